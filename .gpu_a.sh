set -u
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit 1
export PYTHONPATH=/tmp/site:$PWD HEXA_FX_CACHE_DIR=/tmp/kc PYTHONUNBUFFERED=1
mkdir -p /tmp/kc; [ -f .whl/kc.tgz ] && tar xzf .whl/kc.tgz -C /tmp/kc
python3 -c "import torch, transformers, hexa_fx; print(torch.__version__, transformers.__version__, torch.cuda.get_device_name())"
(timeout 200 python3 examples/train_small_moe.py --device cuda --size small --steps 40 --impls hexa,grouped_mm,hexa-fp8 --json $OUT/train.json 2>&1 | tail -40)
(timeout 330 python3 benchmarks/bench_use.py --models ${MODELS:-olmoe,qwen3-30b} --seconds 0.4 --json $OUT/use.json > $OUT/use.log 2>&1); grep '^{' $OUT/use.log | cut -c1-260; grep -v '^{' $OUT/use.log | grep -v "Loading\|Writing\|warn" | tail -30 | cut -c1-300
tar czf $OUT/kc.tgz -C /tmp/kc . ; ls -la $OUT
