"""What may come with a request to load a model. Its files and configuration are the control plane's business."""

from __future__ import annotations

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import refuse


def check_load_parameters(parameters: object) -> None:
    """Refuses a configuration or files that a client sends along.

    Raises:
        InvalidRequest: naming the parameter.
    """
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        refuse("parameters", parameters, "an object")
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            message = f"parameters.{name[:60]} is set; models are configured by their ModelDeployment: leave it out"
            raise InvalidRequest(message, param="parameters")
