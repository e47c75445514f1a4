"""Page cache is memory that can be taken; a control group's limit is not to be passed."""

from kvscope.engine.host_memory import free_host_bytes

MIB = 1 << 20


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 24684096 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\n"}


def test_page_cache_counts_as_free(tmp_path):
    assert free_host_bytes(write(tmp_path, MEMINFO)) == 8192 * MIB


def test_a_control_group_limits_what_is_free(tmp_path):
    group = {
        "sys/fs/cgroup/memory.max": str(900 * MIB),
        "sys/fs/cgroup/memory.current": str(500 * MIB),
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
    }
    assert free_host_bytes(write(tmp_path, MEMINFO | group)) == 500 * MIB


def test_the_first_version_of_control_groups_too(tmp_path):
    group = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(300 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(400 * MIB),
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {50 * MIB}\n",
    }
    assert free_host_bytes(write(tmp_path, MEMINFO | group)) == 0


def test_a_group_without_a_limit_limits_nothing(tmp_path):
    group = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": str(500 * MIB)}
    assert free_host_bytes(write(tmp_path, MEMINFO | group)) == 8192 * MIB


def test_without_proc_the_free_pages_are_what_is_left(tmp_path):
    assert free_host_bytes(tmp_path) > 0
