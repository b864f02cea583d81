"""Standard gRPC health and reflection beside the Worker service."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from naru_proto.v1 import worker_pb2

SERVICE_NAME: str = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_REFLECTION_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Health:
    """What the health service says: serving, or not. Asyncio thread only."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.is_serving = False

    def attach(self, server: Any) -> None:
        """Registers health and reflection on a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        server.add_generic_rpc_handlers((_LateReflection((SERVICE_NAME, health.SERVICE_NAME)),))

    async def set(self, *, is_serving: bool) -> None:
        """Changes the answer for the whole server and for the Worker service; watchers are told."""
        self.is_serving = is_serving
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._servicer.set(name, status)


class _LateReflection(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Reflection, imported when it is first asked for: people need it now and then, each start would pay for it."""

    def __init__(self, service_names: tuple[str, ...]) -> None:
        self._service_names = service_names
        self._handler: Any = None

    def service(self, handler_call_details: Any) -> Any:
        """The handler of the one reflection method; None for all others."""
        if handler_call_details.method != _REFLECTION_METHOD:
            return None
        if self._handler is None:
            from grpc_reflection.v1alpha import reflection, reflection_pb2

            servicer = reflection.ReflectionServicer((*self._service_names, reflection.SERVICE_NAME))
            self._handler = grpc.stream_stream_rpc_method_handler(
                servicer.ServerReflectionInfo,
                request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
                response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
        return self._handler
