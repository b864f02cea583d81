"""`naru explain request`: where a request went and why, or where one would go now. Asks the routers by HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from naru_operator.cli.router_pages import ask, page_of, router_client, router_urls
from naru_operator.cli.status import EXIT_NOTHING_RUNS
from naru_proto.errors import ModelNotFound, Unavailable


def run_explain_request(request_id: str, urls: Sequence[str], api_key: str | None, *, is_json: bool) -> int:
    """Prints the course of a request that one of the routers remembers.

    Raises:
        ModelNotFound: no router remembers it.
        NaruError: a router could not be asked.
    """
    routers = router_urls(urls)
    if not routers:
        return EXIT_NOTHING_RUNS
    failures: list[Unavailable] = []
    with router_client(api_key) as client:
        for url in routers:
            try:
                page = page_of(ask(client, "GET", f"{url}/v1/naru/requests/{quote(request_id, safe='')}"), url)
            except ModelNotFound:
                continue
            except Unavailable as exc:
                failures.append(exc)  # another one may remember it
            else:
                click.echo(_written(page, url, is_json=is_json))
                return 0
    if failures:
        raise failures[0]
    raise ModelNotFound(
        f"no router remembers a request {request_id[:130]!r}; each keeps its last ones: give the x-request-id of a "
        "recent reply, and --url of the router that answered it"
    )


def run_explain_route(
    model: str, prompt: str, urls: Sequence[str], api_key: str | None, *, is_chat: bool, is_json: bool
) -> int:
    """Prints where a request with this prompt would go now; nothing is sent to a worker.

    Raises:
        NaruError: as the router said.
    """
    routers = router_urls(urls)
    if not routers:
        return EXIT_NOTHING_RUNS
    content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    with router_client(api_key) as client:
        url = routers[0]  # all have the same map and hear the same of the workers
        page = page_of(ask(client, "POST", f"{url}/v1/naru/route", {"model": model, **content}), url)
        click.echo(_written(page, url, is_json=is_json))
    return 0


def _written(page: Mapping[str, Any], url: str, *, is_json: bool) -> str:
    if is_json:
        return json.dumps(page, indent=2)
    try:
        text = render(page)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Unavailable(f"{url!r} is no router of this version ({exc!r}); check --url, or ask with -o json") from exc
    # Reasons and errors are words of routers and workers: none of them steers the terminal.
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in text.split("\n"))


def render(trace: Mapping[str, Any]) -> str:
    """The course for people."""
    tokens, keys = trace["estimated_prompt_tokens"], trace["route_keys"]
    lines = [f"{trace['request_id'] or 'a request'} for {trace['model']}: {trace['outcome']}"]
    lines.append(f"  about {tokens} prompt tokens, {keys} route keys, priority {trace['priority']}")
    if trace["total_s"]:
        lines.append(f"  took {_seconds(trace['total_s'])}")
    for number, attempt in enumerate(trace["attempts"], 1):
        held = ", held there until the model is loaded" if attempt["held"] else ""
        stand_in = f" for {attempt['model']}" if attempt["model"] != trace["model"] else ""
        lines.append(f"{number}. {attempt['worker']}{stand_in}{held}: {attempt['outcome']}")
        lines += [f"     {reason}" for reason in attempt["reasons"]]
        if attempt["first_output_at_s"] is not None:
            expected = attempt["expected_first_output_s"]
            guess = "" if expected is None else f", expected after {_seconds(expected)}"
            took = _seconds(attempt["first_output_at_s"] - attempt["sent_at_s"])
            lines.append(
                f"     first output after {took}{guess}; {attempt['cached_tokens']} tokens were cached, "
                f"{attempt['expected_cached_tokens']} were expected"
            )
        if len(attempt["scores_s"]) > 1:
            ranked = sorted(attempt["scores_s"].items(), key=lambda pair: (pair[1], pair[0]))
            lines.append("     compared: " + ", ".join(f"{worker} {_seconds(score)}" for worker, score in ranked))
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
