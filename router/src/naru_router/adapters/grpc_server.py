"""The gRPC server: the public services, standard health and reflection beside them, TLS where it is set up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from naru_proto.v1 import inference_pb2_grpc, open_inference_pb2_grpc
from naru_router.adapters.grpc_inference import InferenceService
from naru_router.adapters.grpc_oip import OpenInferenceService
from naru_router.adapters.tls_files import TlsFiles

__all__ = ["GrpcServer", "InferenceService"]

SERVICE = "naru.v1.Inference"
OPEN_SERVICE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"


class GrpcServer:
    """The server and its health."""

    def __init__(
        self,
        service: InferenceService,
        max_message_bytes: int,
        *,
        is_shared: bool = False,
        open_inference: OpenInferenceService | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """`is_shared`: other processes listen on the same port. `open_inference`: served beside `service`."""
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", int(is_shared))]
        )
        self._tls = tls
        health_module: Any = health
        self._health: Any = health_module.aio.HealthServicer()
        self._services: Sequence[str] = (SERVICE,)
        inference_pb2_grpc.add_InferenceServicer_to_server(cast(Any, service), self._server)
        if open_inference is not None:
            self._services = (SERVICE, OPEN_SERVICE)
            add: Any = open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
            add(open_inference, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*self._services, _HEALTH, reflection.SERVICE_NAME), self._server)
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Binds and serves.

        Raises:
            OSError: the port cannot be had.
        """
        address, fault = f"{host}:{port}", f"gRPC cannot listen on {host}:{port}; is the port in use?"
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError as exc:
            raise OSError(fault) from exc
        if self.port == 0:
            raise OSError(fault)
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Says over standard health whether requests are taken."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls and ends the others after the grace."""
        await self._server.stop(grace_s)
