#!/usr/bin/env bash
# A node of a Ray cluster.  worker.sh HEAD-ADDRESS [ADDRESS [OPTION OF ray start]...]
set -euo pipefail

head=${1:?usage: worker.sh HEAD-ADDRESS [ADDRESS]}
address=${2:-$(hostname -I | awk '{print $1}')}

export RAY_AUTH_MODE=token
# While the head is away, the node waits for it; on SIGTERM it is drained, so that jobs leave it first.
export RAY_gcs_rpc_server_reconnect_timeout_s=600 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${DRAIN_S:-60}
exec ray start --address="$head:${PORT:-6379}" --node-ip-address="$address" --disable-usage-stats --block "${@:3}"
