"""How much of the host's memory can still be taken: what the kernel could hand out, within the control group."""

import os
from pathlib import Path

# Version 2 and version 1 of control groups, as seen from inside a container: the limit, what is used, and how to tell
# which part of that is page cache which goes first when memory is short.
_GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: free memory and page cache alike. `root` is where /proc and /sys are.

    Free pages alone would call a machine full as soon as it has read enough files.
    """
    rooms = [_available(root), *(_room_in_group(root, *names) for names in _GROUPS)]
    return min(room for room in rooms if room is not None)


def _available(root: Path) -> int:
    """`MemAvailable` of Linux; elsewhere, or on a kernel without it, the free pages."""
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _room_in_group(root: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """What the control group still allows; None where there is none or it sets no limit."""
    try:
        room = int((root / limit).read_text()) - int((root / used).read_text())  # "max" is no number: no limit
        statistics = (root / limit).with_name("memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    counts = dict(zip(statistics[::2], statistics[1::2], strict=False))
    return max(room + int(counts.get(reclaimable, 0)), 0)
