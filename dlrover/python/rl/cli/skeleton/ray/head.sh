#!/usr/bin/env bash
# The head of a Ray cluster, which keeps its tables on disk: started again, it continues.  head.sh [ADDRESS [OPTION OF ray start]...]
set -euo pipefail

address=${1:-$(hostname -I | awk '{print $1}')}
state=${STATE_DIR:-$HOME/.dlrover-rl/gcs}
mkdir -p "$state"

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_gcs_storage=rocksdb RAY_gcs_storage_path=$state
exec ray start --head --node-ip-address="$address" --port="${PORT:-6379}" --include-dashboard=false --disable-usage-stats --block "${@:2}"
