# SPDX-License-Identifier: Apache-2.0
"""Which options the example of a library reads: run in the library's environment, ``option_reads.py LIBRARY``.

An option is read if its name is, in a module of the library that the example imports or in the example. Options of one
name in several sections differ by the section for OpenRLHF, whose code names it; verl's code hands sections on.
"""

import argparse
import ast
import json
import re
import sys
from datetime import datetime
from pathlib import Path

IN_THE_JOB_FILE = re.compile(
    r"(actor|critic|ref|reward)\.num_\w+|train\.colocate_\w+|vllm\.(num_engines|sync_backend)|ckpt\.save_steps|logger\..*"
)
"""Options of OpenRLHF that only its checks read: the job's placement, commits and log stand for them."""

EXAMPLE = Path("examples", sys.argv[1])
sys.path.insert(0, str(EXAMPLE))


def sources():
    """Return the syntax trees of the example and of the library's modules that it imports, without its commands.
    verl imports its engine late."""
    __import__("ppo")
    names = [name for name in sys.modules if name.split(".")[0] == sys.argv[1] and f"{sys.argv[1]}.cli" not in name]
    files = {getattr(sys.modules[name], "__file__", None) for name in names} - {None}
    files |= {str(path) for path in EXAMPLE.glob("*.py") if path.name != "options.py"}
    package = Path(next(iter(sys.modules[sys.argv[1]].__path__)))
    files |= {
        str(path) for name in ("workers/engine/megatron", "utils/megatron") for path in package.glob(f"{name}*/*.py")
    }
    return [ast.parse(Path(file).read_text()) for file in files]


def names_read():
    """Return the names that are read, the pairs of a section and a name or ``*``, and patterns of f-strings."""
    names, pairs, patterns = set(), set(), []
    for node in (node for tree in sources() for node in ast.walk(tree)):
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                pairs.add((ast.unparse(value).split(".")[-1], name))
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=name), *_]):
                pairs.add((ast.unparse(value).split(".")[-1], name))
            case ast.Call(func=ast.Name(id="vars"), args=[ast.Attribute(attr=name)]):
                pairs.add((name, "*"))
            case ast.Constant(value=str(name)):
                names.add(name)
            case ast.JoinedStr(values=[ast.Constant(), *_] as parts):
                patterns.append("".join(part.value if isinstance(part, ast.Constant) else r"\w+" for part in parts))
    texts = [re.compile(text) for text in patterns if re.fullmatch(r"[a-z_]+_(\\w\+[a-z_]*)+", text)]
    return names | {name for _, name in pairs}, pairs, texts


def of_openrlhf():
    """Return its options by what becomes of them."""
    import options
    from openrlhf import cli

    main = ast.parse(Path(cli.__path__[0], "train_ppo_ray.py").read_text()).body[-1]
    built = {"argparse": argparse, "datetime": datetime}
    reads = [ast.unparse(statement) for statement in main.body].index("args = parser.parse_args()")
    options.run(main.body[:reads], built)
    pairs = names_read()[1]

    def fate(name):
        if options.NOT_HERE.fullmatch(name):
            return "refused"
        if IN_THE_JOB_FILE.fullmatch(name):
            return "in the job file"
        section, key = f"args.{name}".split(".")[-2:]
        return "read" if pairs & {(section, key), (section, "*")} else "ignored"

    return {name: fate(name) for name in vars(built["parser"].parse_args([]))}


def of_verl():
    """Return its options by what becomes of them. A section ``override_...`` is read as a whole."""
    import options
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        whole = OmegaConf.to_container(compose("ppo_megatron_trainer"))
    names, _, patterns = names_read()

    def fate(name):
        if not options.TAKEN.fullmatch(name):
            return "refused"
        key = next((part for part in name.split(".") if part.startswith("override_")), name.split(".")[-1])
        return "read" if key in names or any(text.fullmatch(key) for text in patterns) else "ignored"

    shipped = json.loads(Path("tests/slow/shipped_options.json").read_text())["verl"]["options"]
    return {name: fate(name) for name in [*dict(options.flatten(whole)), *shipped]}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({"openrlhf": of_openrlhf, "verl": of_verl}[sys.argv[1]]()) + "\n")
