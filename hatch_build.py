"""Build hook: compiles the CPU kernels when the project is installed, so that the first start need not.

A wheel gets every variant, an editable install the one of this machine. Without a compiler the install goes on with a
warning: the kernels are then built when a CPU worker first starts, or the installation serves without the CPU backend.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "worker" / "src" / "naru_worker" / "native"


class NativeKernels(BuildHookInterface[Any]):
    """Adds `libnaru_cpu_*.so` to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the variants and marks the wheel as made for this platform."""
        # A router's or operator's image is built without the worker's sources.
        if self.target_name != "wheel" or not NATIVE.is_dir():
            return
        sys.path.insert(0, str(NATIVE))
        try:
            import build as native_build
            import isa as native_isa
        finally:
            sys.path.remove(str(NATIVE))
        variants = [native_isa.detect_isa(forced="")] if version == "editable" else list(native_isa.VARIANTS)
        try:
            built = [native_build.ensure_library(variant) for variant in variants]
        except native_build.BuildError as error:
            self.app.display_warning(f"CPU kernels not compiled: {error}")
            return
        inside = [path for path in built if path.parent == NATIVE]
        if version != "editable" and inside:
            build_data["pure_python"] = False
            # The libraries are called through ctypes: any Python will do, but only this kind of machine.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            for path in inside:
                build_data["force_include"][str(path)] = f"naru_worker/native/{path.name}"
