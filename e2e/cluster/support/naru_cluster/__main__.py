"""`python -m naru_cluster`: a cluster for people, kept running until it is taken down."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from naru_cluster import machine
from naru_cluster.cluster import Cluster
from naru_cluster.errors import ClusterError
from naru_cluster.left_over import clusters, remove_left_over
from naru_cluster.parts import build_parts, find_parts

_EXAMPLES = """\
examples:
  python -m naru_cluster up                      the control plane, one real node and DNS, in about 10 s
  python -m naru_cluster up --control-plane --fake-nodes 4
  python -m naru_cluster kubectl get pods -A
  python -m naru_cluster exec ip address         a command inside the first node
  export KUBECONFIG=$(python -m naru_cluster kubeconfig)
  NARU_CLUSTER=naru pytest e2e/controlplane      tests on this cluster instead of one of their own
  python -m naru_cluster restart kube-apiserver
  python -m naru_cluster down
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the status is 1 when it failed, or the command's own."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ClusterError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m naru_cluster",
        description="A real Kubernetes cluster on this machine, in namespaces of its own: no container engine, no "
        "image registry, no access to other networks. Needs root.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="naru", help="which cluster, where several run (default: %(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    up = command("up", _up, "starts a cluster and leaves it running")
    up.add_argument("--control-plane", action="store_true", help="without a real node: pods do not run")
    up.add_argument("--fake-nodes", type=int, default=0, metavar="N", help="add N nodes of 8 GPUs that are not there")
    up.add_argument("--gpus", type=int, default=0, metavar="N", help="let the real node offer N GPUs it does not have")
    up.add_argument("--image", action="append", default=[], type=Path, metavar="TAR", help="import this image archive")
    command("down", _down, "ends a cluster and removes all of it")
    command("status", _status, "shows all clusters and their components")
    command("kubeconfig", _kubeconfig, "prints the path of the cluster's kubeconfig")
    sub = command("kubectl", _kubectl, "runs kubectl")
    sub.add_argument("arguments", nargs=argparse.REMAINDER)
    sub = command("helm", _helm, "runs Helm")
    sub.add_argument("arguments", nargs=argparse.REMAINDER)
    sub = command("exec", _exec, "runs a command inside a node: its network, mounts and processes")
    sub.add_argument("--node", default="n0", help="which node (default: %(default)s)")
    sub.add_argument("arguments", nargs=argparse.REMAINDER)
    sub = command("reach", _reach, "opens a loopback port that leads to an address inside, and prints it")
    sub.add_argument("host")
    sub.add_argument("port", type=int)
    sub = command("load", _load, "imports an image archive into the nodes")
    sub.add_argument("archive", type=Path)
    for name, text in (("kill", "kills a component as kill -9 does"), ("start", "starts a component")):
        sub = command(name, _component, text)
        sub.add_argument("component")
        sub.set_defaults(action=name)
    sub = command("restart", _component, "kills a component and starts it again")
    sub.add_argument("component")
    sub.set_defaults(action="restart")
    sub = command("parts", _parts, "builds the Go parts into the cache (minutes, once)")
    sub.add_argument("--install-packages", action="store_true", help="install missing Debian packages first")
    return parser


def _up(options: argparse.Namespace) -> int:
    parts = build_parts(_say)
    for name in remove_left_over(parts):
        _say(f"removed what was left of {name}")
    cluster = Cluster(options.name, parts)
    cluster.up(full_node=not options.control_plane, end_with_caller=False)
    for what, seconds in cluster.steps:
        _say(f"{seconds:6.1f} s  {what}")
    for image in options.image:
        cluster.load_image(image)
    if options.gpus:
        cluster.set_gpus("n0", options.gpus)
    if options.fake_nodes:
        cluster.add_fake_nodes(options.fake_nodes)
    _say(f"export KUBECONFIG={cluster.kubeconfig}")
    return 0


def _down(options: argparse.Namespace) -> int:
    if options.name not in clusters():
        raise ClusterError(f"there is no cluster {options.name!r}: {', '.join(clusters()) or 'none'} runs")
    Cluster(options.name, find_parts()).down()
    return 0


def _status(options: argparse.Namespace) -> int:
    for name in clusters():
        try:
            cluster = Cluster.running(name, find_parts())
        except ClusterError as exc:
            print(f"{name}: {exc}")
            continue
        print(f"{name}: nodes {', '.join(cluster.node_names()) or 'none'}, KUBECONFIG={cluster.kubeconfig}")
        for component, pid in cluster.component_states():
            print(f"  {component:24} {pid or 'does not run'}")
    return 0


def _kubeconfig(options: argparse.Namespace) -> int:
    print(_running(options).kubeconfig)
    return 0


def _kubectl(options: argparse.Namespace) -> int:
    return _replace("kubectl", options)


def _helm(options: argparse.Namespace) -> int:
    return _replace("helm", options)


def _replace(program: str, options: argparse.Namespace) -> int:
    cluster = _running(options)
    path = cluster.layout.parts.path(program)
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.layout.folder / "home")}
    os.execve(path, [program, *options.arguments], environment)


def _exec(options: argparse.Namespace) -> int:
    command = _running(options).inside(options.arguments or ["bash"], options.node)
    os.execvp(command[0], command)


def _reach(options: argparse.Namespace) -> int:
    print(_running(options).reach(options.host, options.port))
    return 0


def _load(options: argparse.Namespace) -> int:
    _running(options).load_image(options.archive)
    return 0


def _component(options: argparse.Namespace) -> int:
    getattr(_running(options), options.action)(options.component)
    return 0


def _parts(options: argparse.Namespace) -> int:
    if options.install_packages:
        machine.install_packages()
    print(build_parts(_say).folder)
    return 0


def _running(options: argparse.Namespace) -> Cluster:
    return Cluster.running(options.name, find_parts())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
