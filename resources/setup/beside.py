"""An engine beside the one that is set up: another build, found first by what is started from here."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path

from resources.setup.build_plan import plan_build
from resources.setup.debian import VULKAN_TEST_DRIVER, has_debian_packages, require_packages
from resources.setup.engine_wheel import require_wheel
from resources.setup.places import cache_folder
from resources.setup.stamp import read_stamp
from resources.vulkan import needs as vulkan


def use_engine(backend: str) -> str:
    """Have what is started from here find the engine built for `backend`, whatever the set-up's; return the backend."""
    if backend == "vulkan" and has_debian_packages():
        require_packages([*vulkan.look(os.environ).packages, VULKAN_TEST_DRIVER])
    build, cuda = plan_build(backend, read_stamp().get("cmake_args", ""))
    wheel = require_wheel(build, cuda)
    folder = cache_folder(sys.platform, os.environ, Path.home()) / "engines" / f"{build.key}-library"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="engine-", dir=folder.parent) as scratch:
            unpacked = Path(scratch, "unpacked")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            unpacked.rename(folder)
    # Our own package comes first, then what stands here, and last what is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return build.backend
