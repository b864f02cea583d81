"""Standard gRPC health and reflection beside the Worker service.

Three names may be asked for (Kubernetes: `grpc.service` of a probe). All are answered by the asyncio thread, which
waits for no step of the engine:

- the empty name, for liveness: the engine thread lives and no step of it hangs. A worker that drains is alive.
- `ready`, for readiness: the worker was announced in the route map once, and takes requests. An outage of Redis changes
  nothing: it would make all workers unready at once, though routers go on with the map they have.
- `naru.v1.Worker`: the worker takes requests, announced or not.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from naru_proto import names
from naru_proto.v1 import worker_pb2

SERVICE_NAME: str = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
_REFLECTION_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Health:
    """What the health service says. Asyncio thread only."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.is_alive = True
        """The engine works."""
        self.is_serving = False
        """Requests are taken."""
        self.is_registered = False
        """The route map has had this worker in it."""

    def attach(self, server: Any) -> None:
        """Registers health and reflection on a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        server.add_generic_rpc_handlers((_LateReflection((SERVICE_NAME, health.SERVICE_NAME)),))

    async def publish(self) -> None:
        """Makes the answers those of the fields; watchers are told."""
        for name in ("", SERVICE_NAME, names.HEALTH_READY):
            is_good = self._answer(name)  # of now: a later change may have overtaken this one
            status = health_pb2.HealthCheckResponse.SERVING if is_good else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._servicer.set(name, status)

    def _answer(self, name: str) -> bool:
        if name == names.HEALTH_READY and not self.is_registered:
            return False
        return self.is_alive and (self.is_serving or not name)


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
