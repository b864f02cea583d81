"""The cluster's own network: reached through the door, taken up by other processes, gone with its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from naru_cluster.api import KubeCluster
from naru_cluster.cluster import Cluster
from naru_cluster.errors import ClusterError

SUPPORT = Path(__file__).resolve().parents[1] / "cluster" / "support"
ECHO = """
import socket
server = socket.create_server(("10.99.0.1", 7007))
while True:
    connection, _ = server.accept()
    with connection:
        received = b"".join(iter(lambda: connection.recv(65536), b""))
        connection.sendall(received[::-1])
"""
OWNER = """
import sys
from pathlib import Path
from naru_cluster.namespaces import Namespaces
namespaces = Namespaces(Path(sys.argv[1]))
namespaces.start(sys.argv[2], {}, end_with_caller=True)
import subprocess
child = subprocess.Popen(namespaces.command(["sleep", "3600"]))
print(namespaces.init_pid, flush=True)
child.wait()
"""


@pytest.fixture
def own(control_plane: KubeCluster) -> Cluster:
    if not isinstance(control_plane, Cluster):
        pytest.skip("KUBECONFIG names an existing cluster")
    return control_plane


def test_the_door_carries_both_directions_to_their_ends(own: Cluster) -> None:
    server = own.run_inside([sys.executable, "-c", ECHO], log="echo")
    try:
        address = own.reach("10.99.0.1", 7007).split(":")
        sent = os.urandom(3_000_000)

        def send(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):  # the other half sees it, too
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)

        def exchange() -> bytes:
            with socket.create_connection((address[0], int(address[1]))) as connection:
                writer = threading.Thread(target=send, args=(connection,))
                writer.start()
                try:
                    return b"".join(iter(lambda: connection.recv(65536), b""))
                finally:
                    writer.join()

        def exchanged() -> bytes | None:
            try:
                return exchange()
            except OSError:
                return None  # the server is not there yet

        assert own.wait_for(exchanged, 20.0, "the server answers") == sent[::-1]
    finally:
        server.kill()
        assert server.wait(10.0) == -signal.SIGKILL


def test_where_nobody_listens_a_connection_is_reset(own: Cluster) -> None:
    address = own.reach("10.99.0.1", 7008).split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection, pytest.raises(ConnectionResetError):
        connection.settimeout(10.0)
        connection.recv(1)


def test_nothing_of_the_clusters_network_is_seen_from_outside(own: Cluster) -> None:
    devices = psutil.net_if_addrs()
    assert "node0" not in devices
    assert "10.99.0.1" not in {address.address for addresses in devices.values() for address in addresses}
    inside = subprocess.run(own.inside(["ip", "-brief", "address"]), check=True, capture_output=True, text=True)
    assert "10.99.0.1/24" in inside.stdout


def test_another_process_takes_the_cluster_up_and_leaves_it_as_it_is(own: Cluster) -> None:
    files = [path for path in own.layout.folder.glob("*") if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    other = Cluster.running(own.name, own.layout.parts)
    try:
        assert [path.stat().st_mtime_ns for path in files] == before, "some components end when a file is written"
        assert dict(other.component_states()) == dict(own.component_states())
        assert other.kubectl("get", "namespace", "default", "--output", "name").strip() == "namespace/default"
        other.kill("kube-scheduler")
        assert dict(own.component_states())["kube-scheduler"] is None
    finally:
        other.close()
        own.start("kube-scheduler")


def test_a_component_that_is_not_there_is_named(own: Cluster) -> None:
    with pytest.raises(ClusterError, match="'kubelet' is not a component of this cluster: there are door, etcd"):
        own.kill("kubelet")


def test_a_second_cluster_of_the_same_name_is_refused(own: Cluster) -> None:
    with pytest.raises(ClusterError, match="is there already"):
        Cluster(own.name, own.layout.parts).up(full_node=False, end_with_caller=True)


def test_all_inside_ends_when_the_owner_is_killed(own: Cluster, tmp_path: Path) -> None:
    pause = own.layout.parts.path("pause")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), pause],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        init = psutil.Process(int(owner.stdout.readline()))
        network = os.readlink(f"/proc/{init.pid}/ns/net")
        owner.kill()
    psutil.wait_procs([init], timeout=20.0)

    def inside() -> list[int]:
        found = []
        for pid in psutil.pids():
            try:
                if os.readlink(f"/proc/{pid}/ns/net") == network:
                    found.append(pid)
            except OSError:
                continue
        return found

    own.wait_for(lambda: not inside(), 20.0, "no process is left inside")
