"""The settings file: what is right counts, what is wrong is named, and nothing keeps the dashboard from starting."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.dashboard.keys import KEYS, clashing_keys, typed_keys
from kvscope.dashboard.opening import ScreenFlags, choose_theme, frames_per_second, has_light_ground
from kvscope.dashboard.palettes import ANSI_THEME, DARK, DARK_THEME, LIGHT_THEME
from kvscope.dashboard.settings import MAX_BYTES, Settings, example_lines, load_settings, parse_settings


def test_the_example_says_the_defaults_once_it_is_uncommented():
    lines = example_lines(Path("settings.toml"))
    assert all(not line or line.startswith("#") for line in lines)
    uncommented = "\n".join(re.sub(r"^# (?=[a-z\[])", "", line) for line in lines)
    settings = parse_settings(uncommented.encode())
    assert settings.notices == ()
    assert settings._replace(palette={}, keys={}) == Settings()
    assert settings.palette == DARK
    assert settings.keys == {key.name: typed_keys(key.keys) for key in KEYS}


@pytest.mark.parametrize(
    ("content", "notice"),
    [
        (b'theme = "nonsense"\n', "settings.toml, line 1: theme is one of auto, kvscope, kvscope-light, kvscope-ansi"),
        (b'thme = "kvscope"\n', "settings.toml, line 1: no setting is called 'thme'; did you mean theme?"),
        (b"\nascii = 1\n", "settings.toml, line 2: ascii is true or false"),
        (b"frames_per_second = 0", "settings.toml, line 1: frames_per_second is a whole number from 1 to 60"),
        (b'[keys]\nfreeze = "F"\nfroze = "q"', "settings.toml, line 3: no name in [keys] is called 'froze'; did you"),
        (b'[keys]\nfreeze = "p"', "settings.toml, line 2: the key p is taken by pause"),
        (b'[keys]\nfreeze = "p"\npause = "p"', "settings.toml, line 2: the key p is taken by pause"),
        (b'[keys]\nhelp = "no key"', "settings.toml, line 2: help is a key, or several with commas"),
        (b'[palette]\nbrand = "red"', "settings.toml, line 2: brand is a colour such as #56b4e9"),
        (b"keys = 3", "settings.toml, line 1: keys is a section"),
        (b'ascii = true\ntheme = "', "settings.toml: Unterminated string (at line 2, its end); the defaults are used"),
        (b"ascii = true\n\xff", "settings.toml, line 2: not UTF-8; the defaults are used"),
        (b"x = " + b"[" * 30_000, "; the defaults are used"),
    ],
)
def test_a_mistake_is_named_with_its_line(content, notice):
    notices = parse_settings(content).notices
    assert len(notices) == 1
    assert notice in notices[0]
    assert "\n" not in notices[0]


def test_what_is_right_beside_a_mistake_counts():
    settings = parse_settings(b'ascii = true\nmouse = 3\n[keys]\nhelp = "h,f1"\nquit = 3\n[palette]\nbrand = "#112233"')
    assert settings.ascii
    assert settings.mouse
    assert settings.keys == {"help": "h,f1"}
    assert settings.palette == {"brand": "#112233"}
    assert len(settings.notices) == 2


def test_no_file_is_no_mistake_and_an_unreadable_one_is(tmp_path):
    assert load_settings(tmp_path / "none.toml") == Settings()
    assert load_settings(tmp_path).notices == (f"{tmp_path.name}: Is a directory; the defaults are used",)
    (tmp_path / "long.toml").write_bytes(b"#" * (MAX_BYTES + 1))
    assert "longer than" in load_settings(tmp_path / "long.toml").notices[0]


@given(st.binary(max_size=200) | st.text(alphabet='theme=[]"keys\n#asci truf{}.1', max_size=80).map(str.encode))
def test_no_file_raises(content):
    settings = parse_settings(content)
    assert isinstance(settings, Settings)


def test_keys_of_ones_own_may_use_what_the_user_has_freed():
    assert list(clashing_keys({})) == []
    assert list(clashing_keys({"pause": "f", "freeze": "p"})) == []
    assert list(clashing_keys({"help": "q"})) == [("q", ["quit", "help"])]
    assert [key for key, _ in clashing_keys({"copy": "?"})] == ["?"]


def test_the_theme_follows_the_terminal_unless_it_is_named(monkeypatch):
    for name in ("NO_COLOR", "COLORFGBG", "COLORTERM", "TEXTUAL_COLOR_SYSTEM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert choose_theme(None, Settings()) == DARK_THEME
    monkeypatch.setenv("COLORFGBG", "0;15")
    assert has_light_ground()
    assert choose_theme(None, Settings()) == LIGHT_THEME
    monkeypatch.setenv("TERM", "xterm")
    assert choose_theme(None, Settings()) == ANSI_THEME
    assert choose_theme(None, Settings(theme="nord")) == "nord"
    assert choose_theme("gruvbox", Settings(theme="nord")) == "gruvbox"
    assert ScreenFlags().theme is None


def test_over_ssh_there_are_at_most_twelve_frames_a_second(monkeypatch):
    for name in ("SSH_CONNECTION", "SSH_TTY"):
        monkeypatch.delenv(name, raising=False)
    assert frames_per_second(Settings(frames_per_second=30)) == 30
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")
    assert frames_per_second(Settings(frames_per_second=30)) == 12
    assert frames_per_second(Settings(frames_per_second=5)) == 5
