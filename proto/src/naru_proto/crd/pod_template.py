"""What a WorkerPool may change in its workers' pods: a short list, not a whole PodSpec."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from naru_proto.crd.base import CrdModel, Items, Rule
from naru_proto.crd.units import DnsSubdomain, ResourceAmount


class SecretKey(CrdModel):
    """One key of a Secret in the pool's namespace."""

    name: DnsSubdomain = Field(description="Name of the Secret.")
    key: str = Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="Key in the Secret.")


class EnvVar(CrdModel):
    """An environment variable, given plainly or from a Secret."""

    name: str = Field(max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Name of the variable.")
    value: str | None = Field(default=None, max_length=32768, description="Its value. Put secrets in a Secret instead.")
    secret_key: SecretKey | None = Field(default=None, alias="secretKey", description="Where its value is kept.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "name",
            "has(self.value) != has(self.secretKey)",
            "must come with either value or secretKey: write one of the two",
            lambda env: (env.value is None) != (env.secret_key is None),
        ),
    )


class Toleration(CrdModel):
    """A node taint the pods put up with; as in a PodSpec."""

    key: str | None = Field(default=None, max_length=316, description="Taint key. Absent with Exists: all.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="How key and value are compared.")
    value: str | None = Field(default=None, max_length=63, description="Taint value for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect that is tolerated. Absent: all."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "key",
            "self.operator == 'Exists' || has(self.key)",
            "must be set for operator Equal: write a key or operator: Exists",
            lambda toleration: toleration.operator == "Exists" or toleration.key is not None,
        ),
        Rule(
            "value",
            "self.operator == 'Equal' || !has(self.value)",
            "must be absent for operator Exists: leave it out or write operator: Equal",
            lambda toleration: toleration.operator == "Equal" or toleration.value is None,
        ),
    )


class ContainerResources(CrdModel):
    """What the container asks for; accelerators are added by Naru."""

    requests: dict[str, ResourceAmount] = Field(
        default_factory=dict, max_length=16, description="Amounts the scheduler reserves, such as cpu and memory."
    )
    limits: dict[str, ResourceAmount] = Field(
        default_factory=dict, max_length=16, description="Amounts the container may not pass."
    )


class PodTemplate(CrdModel):
    """Changes to the workers' pods."""

    labels: dict[str, str] = Field(default_factory=dict, max_length=64, description="Labels to add.")
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64, description="Annotations to add.")
    node_selector: dict[str, str] = Field(
        default_factory=dict, alias="nodeSelector", max_length=64, description="Labels nodes must have."
    )
    tolerations: Items[Toleration] = Field(default=(), max_length=64, description="Taints to put up with.")
    service_account_name: DnsSubdomain | None = Field(
        default=None, alias="serviceAccountName", description="Service account of the pods."
    )
    priority_class_name: DnsSubdomain | None = Field(
        default=None, alias="priorityClassName", description="Priority class of the pods."
    )
    runtime_class_name: DnsSubdomain | None = Field(
        default=None, alias="runtimeClassName", description="Runtime class of the pods, such as nvidia."
    )
    image_pull_secrets: Items[DnsSubdomain] = Field(
        default=(), alias="imagePullSecrets", max_length=16, description="Secrets to pull the image with."
    )
    env: Items[EnvVar] = Field(
        default=(),
        max_length=128,
        description="Environment variables of the container.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    resources: ContainerResources = Field(
        default_factory=ContainerResources, description="What the container asks for."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "env",
            "!has(self.env) || self.env.all(a, self.env.exists_one(b, b.name == a.name))",
            "must have unique names: rename or remove the repeated one",
            lambda template: len({env.name for env in template.env}) == len(template.env),
        ),
    )
