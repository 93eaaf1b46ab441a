#!/bin/sh
# ./run.sh [tests|demo|bench|all] [--out DIR]
here=$(cd "$(dirname "$0")" && pwd)

# More managed memory than the card has free can hang a GPU.
export UNIMALLOC_MAX_BYTES="${UNIMALLOC_MAX_BYTES:-1GiB}"

# Where drivers and toolkits are when the loader has not been told. Never the toolkit's stubs.
for folder in /usr/local/nvidia/lib64 /usr/local/cuda/lib64; do
  [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
[ -n "$LD_LIBRARY_PATH" ] && export LD_LIBRARY_PATH

exec "$here/bin/node" "$here/run.mjs" "$@"
