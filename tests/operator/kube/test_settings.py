"""The operator's settings, where it runs, and what it reads for worker pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from naru_operator.adapters.kube import own_pod
from naru_operator.adapters.kube.own_pod import own_identity, own_namespace
from naru_operator.adapters.kube.pod_settings import read_pod_settings
from naru_operator.settings import Settings, field_docs, load_settings
from naru_proto.settings import SettingsError


def test_flags_win_over_the_environment_and_both_over_defaults() -> None:
    environment = {"NARU_OPERATOR_RESYNC_S": "60", "NARU_OPERATOR_STATUS_INTERVAL_S": "1.5", "OTHER": "x"}
    settings = load_settings(["--resync-s", "90", "--no-leader-election"], environment)
    assert (settings.resync_s, settings.status_interval_s, settings.leader_election) == (90.0, 1.5, False)
    assert settings.log_format == "text"


def test_each_setting_is_explained() -> None:
    docs = field_docs()
    assert set(docs) == set(Settings.__dataclass_fields__)
    assert all(text.endswith((".", "/metrics.")) for text in docs.values())


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("REDIS_URL", "http://user:hush@redis", "redis_url is 'http://…'"),
        ("NAMESPACE", "Big_Name", "namespace is 'Big_Name'"),
        ("WATCH_NAMESPACES", "a,B", "watch_namespaces is 'a,B'; it must be namespaces with commas between"),
        ("WATCH_NAMESPACES", "a,*", "watch_namespaces is 'a,"),
        ("WORKER_REDIS_SECRET", "", "worker_redis_secret is ''"),
        ("WORKER_SERVICE_ACCOUNT", "a/b", "worker_service_account is 'a/b'"),
        ("WORKER_IMAGE", "a b", "worker_image is 'a b'"),
        ("WORKER_IMAGE_PULL_POLICY", "Sometimes", "one of Always, IfNotPresent, Never"),
        ("LEADER_ELECTION", "perhaps", "NARU_OPERATOR_LEADER_ELECTION is 'perhaps'; it must be true or false"),
        ("LEADER_ELECTION", "", "must be true or false"),
        ("STATUS_INTERVAL_S", "-1", r"status_interval_s is -1.0; it must be in \[0, 3600\]"),
        ("STATUS_INTERVAL_S", "nan", r"status_interval_s is nan; it must be in \[0, 3600\]"),
        ("RESYNC_S", "0", "resync_s is 0.0"),
        ("RESYNC_S", "often", "must be a number"),
        ("HEALTH_LISTEN", "8082", "health_listen is '8082'; it must be host:port"),
        ("HEALTH_LISTEN", "0.0.0.0:70000", "health_listen"),
        ("LOG_LEVEL", "loud", "log_level is 'loud'; it must be one of debug, info, warning, error"),
        ("LOG_FORMAT", "xml", "log_format is 'xml'; it must be one of text, json"),
    ],
)
def test_a_bad_value_stops_the_start_with_its_name_and_text(variable: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        load_settings([], {f"NARU_OPERATOR_{variable}": value})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "watched"),
    [("", ("own",)), (" , ", ("own",)), ("*", None), (" * ", None), ("a, b,a", ("a", "b"))],
)
def test_watched_namespaces_are_own_some_or_all(text: str, watched: tuple[str, ...] | None) -> None:
    assert Settings(watch_namespaces=text).watched("own") == watched


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0:8082", ("0.0.0.0", 8082)), ("[::1]:0", ("::1", 0)), ("localhost:1", ("localhost", 1))],
)
def test_the_health_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert Settings(health_listen=text).health_address == address


def test_the_own_namespace_is_found_where_the_pod_tells_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    monkeypatch.setattr(own_pod, "_NAMESPACE_FILE", tmp_path / "namespace")
    with pytest.raises(SettingsError, match="--namespace"):
        own_namespace(Settings())
    (tmp_path / "namespace").write_text("from-account\n")
    assert own_namespace(Settings()) == "from-account"
    monkeypatch.setenv("POD_NAMESPACE", "from-pod")
    assert own_namespace(Settings()) == "from-pod"
    assert own_namespace(Settings(namespace="given")) == "given"


def test_no_two_replicas_get_the_same_identity_by_default() -> None:
    assert own_identity(Settings()) != own_identity(Settings())
    assert own_identity(Settings(identity="pod-0")) == "pod-0"


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "template.yaml"
    path.write_text(text)
    return read_pod_settings(Settings(worker_image="w:1", worker_template_file=str(path))).template


def test_pod_settings_are_those_of_the_installation(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"env": [{"name": "A", "value": "1"}], "nodeSelector": {"gpu": "yes"}}')
    settings = Settings(
        worker_image="naru/worker:1",
        worker_redis_secret="r",
        worker_service_account="s",
        worker_image_pull_policy="Never",
        worker_template_file=str(tmp_path / "t.json"),
    )
    made = read_pod_settings(settings)
    assert (made.image, made.redis_secret, made.service_account) == ("naru/worker:1", "r", "s")
    assert made.image_pull_policy == "Never"
    assert made.template == {"env": [{"name": "A", "value": "1"}], "nodeSelector": {"gpu": "yes"}}
    assert read_pod_settings(Settings(worker_image="w")).template == {}


def test_an_empty_template_is_no_template(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing\n") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "must hold a mapping"),
        ("env: [\n", "is no YAML in line 2"),
        ("annotations: {since: 2024-01-01}\n", "what JSON cannot"),
        ("annotations: &a {self: *a}\n", "what JSON cannot"),
        ("resources: {limits: {cpu: .nan}}\n", "what JSON cannot"),
        ("nodeSelektor: {}\n", "no field nodeSelektor: did you mean 'nodeSelector'"),
        ("env: {A: 1}\n", "env is {'A': 1}; write a list"),
        ("labels: !!python/object/apply:os.getcwd []\n", "is no YAML"),
    ],
)
def test_a_template_that_cannot_be_used_stops_the_start(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        read(tmp_path, text)


def test_a_huge_template_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="more than 1048576 bytes"):
        read(tmp_path, "#" * (1024 * 1024 + 1))


def test_missing_files_and_images_are_named() -> None:
    with pytest.raises(SettingsError, match="worker_image is empty"):
        read_pod_settings(Settings())
    with pytest.raises(SettingsError, match=r"'/nowhere/t\.yaml' cannot be read: No such file"):
        read_pod_settings(Settings(worker_image="w", worker_template_file="/nowhere/t.yaml"))
