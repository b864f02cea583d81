"""YAML or JSON text to plain values, for files that people write: manifests and tenants. Does no I/O.

Whoever calls it has PyYAML among its own dependencies.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class BadYaml(ValueError):
    """A text that is no YAML we take; the message goes on after the file's name."""


def load_yaml(data: bytes) -> list[object]:
    """All documents of a text.

    Raises:
        BadYaml: with the place and what is wrong there.
    """
    try:
        return list(yaml.load_all(data.decode("utf-8"), Loader=_Loader))
    except UnicodeDecodeError as exc:
        raise BadYaml(f"is not UTF-8 text at byte {exc.start}: save it as UTF-8") from exc
    except yaml.MarkedYAMLError as exc:
        where = (
            f" at line {exc.problem_mark.line + 1}, column {exc.problem_mark.column + 1}" if exc.problem_mark else ""
        )
        raise BadYaml(f"is no valid YAML{where}: {exc.problem or exc.context}") from exc
    except (yaml.YAMLError, ValueError, OverflowError) as exc:
        raise BadYaml(f"is no valid YAML: {str(exc).splitlines()[0]}") from exc
    except RecursionError as exc:
        raise BadYaml("is nested too deeply") from exc


class _Loader(yaml.SafeLoader):
    """Plain YAML only: repeated keys are refused, as the last would win silently, and so are aliases, as a few lines
    of them unfold to gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuses aliases."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "YAML aliases are not taken: write it out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuses repeated keys."""
        seen = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value[:80]!r} stands twice: remove one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
