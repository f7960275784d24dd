# SPDX-License-Identifier: Apache-2.0
"""Whether a Ray cluster lets everybody run code on it: its ports are asked, as a stranger would, without a token."""

import http.client
from contextlib import closing
from http import HTTPStatus

import ray
from ray._private import ray_constants
from ray.experimental.internal_kv import _internal_kv_get

from dlrover.python.rl.common.sockets import is_loopback, machine_addresses

_ASK_S = 5.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_REFUSALS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def risk_of_open_ray() -> str:
    """Why the cluster that this process is connected to is dangerous; empty if neither its GCS nor its dashboard
    answers a request without a token from beyond loopback. A firewall that keeps out this machine hides the risk."""
    dashboard = _internal_kv_get(ray_constants.DASHBOARD_ADDRESS, namespace=ray_constants.KV_NAMESPACE_DASHBOARD)
    return find_risk(str(ray.get_runtime_context().gcs_address), (dashboard or b"").decode())


def find_risk(gcs: str, dashboard: str) -> str:
    """:func:`risk_of_open_ray` of a GCS and a dashboard, ``host:port``; "" for none. What is named by a loopback
    address may listen on the others, too."""
    for name, address, answers in (("GCS", gcs, gcs_answers), ("dashboard", dashboard, dashboard_answers)):
        host, _, port = address.rpartition(":")
        for reached in machine_addresses() if is_loopback(host) else [host] if host else []:
            if answers(f"{reached}:{port}"):
                return (
                    f"Ray's {name} at {reached}:{port} answers without a token: whoever reaches it runs code on the"
                    " cluster. Set RAY_AUTH_MODE=token on all nodes, or keep its ports in a private network"
                )
    return ""


def dashboard_answers(address: str) -> bool:
    """Return True if the job server at ``address`` answers anything but a refusal."""
    with closing(http.client.HTTPConnection(address, timeout=_ASK_S)) as connection:
        try:
            connection.request("GET", "/api/jobs/")
            return connection.getresponse().status not in _REFUSALS
        except (OSError, http.client.HTTPException):
            return False


def gcs_answers(address: str) -> bool:
    """Return True if the GCS at ``address`` lists its nodes."""
    import grpc  # takes a moment

    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_ASK_S)
        except grpc.RpcError:
            return False
    return True
