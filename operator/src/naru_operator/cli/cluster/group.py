"""The commands about a cluster: names, flags and help. `naru cluster …`; `kubectl naru …` is the same group."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from naru_operator.cli.checked import checked

if TYPE_CHECKING:
    from naru_operator.cli.cluster.api import ClusterApi


def _in_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags that choose a cluster, and calls the command with a connection to it."""

    @click.option("-n", "--namespace", default=None, help="Namespace; else that of the context.")
    @click.option("--context", default=None, help="Context of the kubeconfig; else the current one.")
    @click.option("--kubeconfig", type=click.Path(path_type=Path, dir_okay=False), default=None,
                  help="The kubeconfig; else KUBECONFIG or ~/.kube/config.")  # fmt: skip
    @functools.wraps(command)
    def wrapped(namespace: str | None, context: str | None, kubeconfig: Path | None, **arguments: Any) -> None:
        def work() -> int:
            from naru_operator.cli.cluster.api import ClusterOptions, open_api

            api = open_api(ClusterOptions(kubeconfig, context, namespace))
            try:
                return int(command(api, **arguments) or 0)
            finally:
                api.close()

        sys.exit(checked(work))

    return wrapped


def _complete_models(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from naru_operator.cli.cluster.api import ClusterOptions, open_api
    from naru_proto.errors import NaruError

    given = context.params
    try:
        api = open_api(ClusterOptions(given.get("kubeconfig"), given.get("context"), given.get("namespace")))
        found = [str(item["metadata"]["name"]) for item in api.items(api.custom("modeldeployments"))]
    except NaruError:
        return []
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


_model = click.argument("model", shell_complete=_complete_models)


@click.group("cluster", context_settings={"help_option_names": ["-h", "--help"]})
def cluster() -> None:
    """Look at and change models in a Kubernetes cluster; `kubectl naru` is short for this.

    Authenticates as kubectl does, from the same kubeconfig.
    """


@cluster.command()
@_in_cluster
def status(api: ClusterApi) -> int:
    """Show models, pools and workers."""
    from naru_operator.cli.cluster.status import run_status

    return run_status(api)


@cluster.group()
def explain() -> None:
    """Say why something is as it is."""


@explain.command("model")
@_model
@_in_cluster
def explain_model(api: ClusterApi, model: str) -> int:
    """Show the conditions, copies, last error and last events of MODEL."""
    from naru_operator.cli.cluster.status import run_explain

    return run_explain(api, "model", model)


@explain.command("pool")
@click.argument("pool")
@_in_cluster
def explain_pool(api: ClusterApi, pool: str) -> int:
    """Show the conditions, workers, last error and last events of POOL."""
    from naru_operator.cli.cluster.status import run_explain

    return run_explain(api, "pool", pool)


@cluster.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@_in_cluster
def plan(api: ClusterApi, paths: tuple[Path, ...]) -> int:
    """Show what applying the manifests in PATHS would do; change nothing."""
    from naru_operator.cli.cluster.plan import run_plan

    return run_plan(api, paths)


@cluster.command()
@_model
@click.option("-f", "--follow", is_flag=True, help="Go on with lines that come, until Ctrl-C.")
@_in_cluster
def logs(api: ClusterApi, model: str, follow: bool) -> int:
    """Show events and log lines about MODEL: its loads, evictions, failures."""
    from naru_operator.cli.cluster.logs import run_logs

    return run_logs(api, model, is_following=follow)


@cluster.command()
@click.argument("model", required=False, shell_complete=_complete_models)
@click.option("--system", default=None, help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(1), default=None, help="Longest answer, in tokens.")
@click.option(
    "--temperature", type=click.FloatRange(0.0, 2.0), default=None, help="0 always takes the likeliest token."
)
@click.option("--api-key", envvar="NARU_API_KEY", default=None, show_envvar=True,
              help="Key of the tenant, where the router knows tenants.")  # fmt: skip
@_in_cluster
def chat(
    api: ClusterApi,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    api_key: str | None,
) -> int:
    """Talk to MODEL (default: the first one served) through the API server; no port-forward is needed."""
    from naru_operator.cli.chat import ChatOptions, run_chat_with
    from naru_operator.cli.chat_client import ChatClient

    client = ChatClient(api.router_path(), http=api.http, api_key=api_key)
    return run_chat_with(client, ChatOptions(model, None, system, max_tokens, temperature))


@click.group()
def rollout() -> None:
    """Follow, list and undo changes of a model's revision in a cluster."""


@rollout.command("status")
@_model
@click.option("--watch/--no-watch", default=True, show_default=True, help="Wait until the rollout is over.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0.0), default=1800.0, show_default=True,
              help="Longest wait in seconds; then exit code 3.")  # fmt: skip
@_in_cluster
def rollout_status(api: ClusterApi, model: str, watch: bool, timeout_s: float) -> int:
    """Show where the rollout of MODEL stands; exit code 1 if it failed."""
    from naru_operator.cli.cluster.rollout import run_rollout_status

    return run_rollout_status(api, model, is_waiting=watch, timeout_s=timeout_s)


@rollout.command("history")
@_model
@_in_cluster
def rollout_history(api: ClusterApi, model: str) -> int:
    """List the revisions of MODEL that are kept."""
    from naru_operator.cli.cluster.rollout import run_rollout_history

    return run_rollout_history(api, model)


@rollout.command("undo")
@_model
@click.option("--to-revision", type=click.IntRange(1), default=None, help="A number of `history`; else the last one.")
@_in_cluster
def rollout_undo(api: ClusterApi, model: str, to_revision: int | None) -> int:
    """Go back to an earlier revision of MODEL."""
    from naru_operator.cli.cluster.rollout import run_rollout_undo

    return run_rollout_undo(api, model, to_revision)


cluster.add_command(rollout)


def main() -> None:
    """Entry point of the kubectl plugin."""
    cluster(prog_name="kubectl naru")
