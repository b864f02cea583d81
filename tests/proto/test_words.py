"""Names and errors the parts share."""

from __future__ import annotations

from collections.abc import Iterator

from naru_proto import errors, names
from naru_proto.crd.manifests import API_VERSION


def concrete_errors(cls: type[errors.NaruError] = errors.NaruError) -> Iterator[type[errors.NaruError]]:
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from concrete_errors(child)


def test_every_error_comes_back_from_its_code_as_it_was() -> None:
    classes = list(concrete_errors())
    assert len(classes) >= 8
    assert {cls.code: cls for cls in classes} == errors.BY_CODE
    assert len({cls.code for cls in classes}) == len(classes)


def test_an_error_keeps_message_and_parameter() -> None:
    error = errors.ContextLengthExceeded("too long: 'x'", param="prompt")
    assert (str(error), error.message, error.param, error.retryable) == (
        "too long: 'x'",
        "too long: 'x'",
        "prompt",
        False,
    )
    assert isinstance(error, errors.InvalidRequest)


def test_keys_of_the_route_map_share_a_prefix_and_never_collide() -> None:
    keys = [
        names.KEY_MODELS,
        names.KEY_WORKERS,
        names.CHANNEL_CHANGES,
        names.key_worker("a"),
        names.key_model_info("a"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("naru:v1:") for key in keys)
    assert names.key_worker("a") != names.key_worker("b")


def test_the_api_version_of_manifests_is_that_of_the_names() -> None:
    assert API_VERSION == f"{names.API_GROUP}/{names.API_VERSION}" == "serving.naru.dev/v1alpha1"
