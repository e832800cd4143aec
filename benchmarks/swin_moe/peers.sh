#!/bin/sh
# Tutel and MegaBlocks from source, as rows of the Swin tables. Nothing of theirs is kept in this repository. PYTHON has torch and wheel.
#
#   sh benchmarks/swin_moe/peers.sh fetch FOLDER         their archives, where there is a network
#   sh benchmarks/swin_moe/peers.sh build FOLDER SITE    built for the torch and the GPU at hand; then put SITE on PYTHONPATH
set -eu
python=${PYTHON:-python3}

GROUPED_GEMM=1a/90/d255544a8da444fdfab7287850316d2c7961003586a35d3042787982e66c/grouped_gemm-0.3.0.tar.gz

# grouped_gemm without pip, whose metadata step asks for a torch with CUDA.
fetch() {
    mkdir -p "$1"
    curl -sSL -o "$1/${GROUPED_GEMM##*/}" "https://files.pythonhosted.org/packages/$GROUPED_GEMM"
    "$python" -m pip download -q --no-deps --no-binary=:all: --no-build-isolation -d "$1" megablocks==0.10.0 stanford-stk==0.7.1
    git clone -q --depth 1 https://github.com/microsoft/Tutel "$1/tutel"
    tar -C "$1" -czf "$1/tutel.tar.gz" tutel
    rm -rf "$1/tutel"
}

# CUDA 13's cub takes no flag for debugging any more, which MegaBlocks passes as the last argument.
without_debug_flag() {
    "$python" - "$1" <<'END'
import pathlib, re, sys
file = pathlib.Path(sys.argv[1])
file.write_text(re.sub(r",\s*debug_synchronous\)", ")", file.read_text()))
END
}

build() {
    mkdir -p "$2"
    work=$(mktemp -d)
    for archive in "$1"/*.tar.gz; do tar -C "$work" -xzf "$archive"; done
    without_debug_flag "$work/megablocks-0.10.0/csrc/cumsum.h"
    for folder in "$work"/*/; do
        name=$(basename "$folder")
        "$python" -m pip install -q --no-deps --no-build-isolation --no-compile --target "$2" "$folder" > "$work/$name.log" 2>&1 \
            || { echo "$name was not built:"; tail -20 "$work/$name.log"; } &
    done
    wait
    rm -rf "$work"
}

case "${1:-}" in
    fetch) fetch "$2" ;;
    build) build "$2" "$3" ;;
    *) sed -n '2,5p' "$0"; exit 2 ;;
esac
