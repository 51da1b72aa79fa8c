"""Films of episodes: what is in them, and what is told where there can be none."""

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from bench.probes import Counting
from impala_async.errors import ConfigError, EnvError
from impala_async.evaluation import video
from impala_async.evaluation.video import check_film, film, frames_of, frames_per_s
from impala_async.files import beside
from tests.wire.ends import until


class Drawn(Counting):
    """Draws the number of its step as a grey that grows; `picture` replaces it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012

    def __init__(self, length=3, render_mode=None, picture="grey"):
        super().__init__(length)
        self.render_mode, self._picture = render_mode, picture

    def render(self):
        if not isinstance(self._picture, str):
            return self._picture
        return np.full((6, 8, 3), 40 * self._step, np.uint8)


def greys(path):
    with Image.open(path) as image:
        shown = []
        for number in range(image.n_frames):
            image.seek(number)
            shown.append((image.convert("RGB").getpixel((0, 0))[0], image.info["duration"]))
        return shown


def test_a_gif_shows_each_frame_for_its_time(tmp_path):
    path = tmp_path / "film.gif"
    check_film(path)
    with film(path, 25.0) as opened:
        for grey in (0, 40, 80):
            opened.add(np.full((6, 8, 3), grey, np.uint8))
    assert greys(path) == [(0, 40), (40, 40), (80, 40)]
    assert list(tmp_path.iterdir()) == [path]


def test_a_gif_that_would_fill_the_memory_ends_and_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(video, "MOST_GIF_BYTES", 100)
    with film(tmp_path / "film.gif", 25.0) as opened:
        for grey in range(5):
            opened.add(np.full((6, 8, 3), 40 * grey, np.uint8))
    assert len(greys(tmp_path / "film.gif")) == 3
    assert capfd.readouterr().err.count("a .gif ends after 3 steps") == 1


def test_a_film_that_fails_leaves_the_one_that_was_there(tmp_path):
    path = tmp_path / "film.gif"
    path.write_bytes(b"before")
    for failing, kind, says in (
        (lambda: frames_of(Drawn(picture=None), "Drawn")(), EnvError, "got NoneType"),
        (
            (tmp_path / "none").read_bytes,
            ConfigError,
            r"--video: cannot write to .*film\.gif: No such file",
        ),
    ):
        with pytest.raises(kind, match=says), film(path, 25.0) as opened:
            opened.add(failing())
    assert [(each, each.read_bytes()) for each in tmp_path.iterdir()] == [(path, b"before")]


def test_a_disk_that_is_full_is_no_wrong_setting(tmp_path):
    path = tmp_path / "film.gif"
    beside(path).symlink_to("/dev/full")
    full = pytest.raises(OSError, match="No space left on device: ")
    with full as caught, film(path, 25.0) as opened:
        opened.add(np.zeros((6, 8, 3), np.uint8))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_is_read_only_is_told_as_what_it_is(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("replace", "unlink"):
        monkeypatch.setattr(video.Path, name, refuse)
    refused = pytest.raises(
        ConfigError, match=r"cannot write to .*film\.gif: Read-only file system"
    )
    with refused, film(tmp_path / "film.gif", 25.0) as opened:
        opened.add(np.zeros((6, 8, 3), np.uint8))


def test_an_mp4_without_its_writer_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"pip install 'impala-async\[video\]'"):
        check_film(tmp_path / "film.mp4")


def test_an_mp4_has_as_many_frames_as_were_added(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="pip install 'impala-async[video]'")
    path = tmp_path / "film.mp4"
    check_film(path)
    with film(path, 25.0) as opened:
        for grey in range(5):
            opened.add(np.full((66, 81, 3), 40 * grey, np.uint8))  # 81 is odd
    assert ffmpeg.count_frames_and_secs(str(path))[0] == 5


@pytest.fixture
def no_ffmpeg(tmp_path, monkeypatch):
    """In the place of ffmpeg, a script that writes to the file that it is given, and then does
    this."""

    def does(what):
        script = tmp_path / "ffmpeg"
        script.write_text(f"#!/bin/sh\nfor file; do :; done\n{what}\n")
        script.chmod(0o755)
        found = SimpleNamespace(get_ffmpeg_exe=lambda: str(script))
        monkeypatch.setitem(sys.modules, "imageio_ffmpeg", found)
        return tmp_path / "film.mp4"

    return does


def show(path, *shapes, before_last=bool):
    with film(path, 25.0) as opened:
        for shape in shapes[:-1]:
            opened.add(np.zeros(shape, np.uint8))
        before_last()
        opened.add(np.zeros(shapes[-1], np.uint8))


FULL_DISK = "echo 'Error writing trailer: No space left on device' >&2; exit 228"


@pytest.mark.parametrize("reads", ["cat > $file; ", ""])
@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        (FULL_DISK, OSError, "No space left on device"),
        (
            "echo one >&2; echo two >&2; exit 1",
            ConfigError,
            r"cannot write to .*film\.mp4: one two",
        ),
        ("kill -9 $$", ConfigError, r"cannot write to .*film\.mp4: ffmpeg was ended"),
    ],
)
def test_an_mp4_that_its_writer_did_not_finish_is_none(reads, what, kind, says, no_ffmpeg):
    path = no_ffmpeg(reads + what)
    path.write_bytes(b"before")
    check_film(path)
    with pytest.raises(kind, match=says):
        show(path, *[(66, 80, 3)] * 100)
    assert path.read_bytes() == b"before"
    assert sorted(each.name for each in path.parent.iterdir()) == ["ffmpeg", "film.mp4"]


def test_an_mp4_whose_pictures_change_their_size_leaves_no_process(no_ffmpeg):
    path = no_ffmpeg("echo $$ > ${file%/*}/pid; exec cat > $file")
    pid = path.with_name("pid")
    with pytest.raises(ConfigError, match=r"a picture of \(6, 9, 3\) follows one of \(6, 8, 3\)"):
        show(path, (6, 8, 3), (6, 9, 3), before_last=lambda: until(pid.exists))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not path.exists()


@pytest.mark.parametrize(
    ("picture", "got"),
    [
        (None, "NoneType"),
        ([np.zeros((6, 8, 3), np.uint8)], "list"),
        (np.zeros((6, 8, 3)), "an array of shape (6, 8, 3) and float64"),
        (np.zeros((6, 8), np.uint8), "an array of shape (6, 8) and uint8"),
    ],
)
def test_only_a_picture_is_one(picture, got):
    with pytest.raises(EnvError) as raised:
        frames_of(Drawn(picture=picture), "Drawn")()
    assert str(raised.value).endswith(f"from its render, got {got}")


def test_the_speed_is_that_of_the_environment_or_the_usual_one():
    assert frames_per_s(Drawn()) == 25.0
    for metadata in ({}, None, {"render_fps": None}, {"render_fps": 0}):
        env = gym.Env()
        env.metadata = metadata
        assert frames_per_s(env) == video.USUAL_FRAMES_PER_S


def test_an_environment_that_cannot_draw_is_told_in_one_line(tmp_path):
    """A real gymnasium environment whose `render` fails, as its package is not there."""
    code = (
        "from impala_async.config.env import EnvSection\n"
        "from impala_async.envs.make import build_drawn\n"
        "from impala_async.evaluation.video import frames_of\n"
        "import sys; sys.modules['pygame'] = None\n"
        "envs, env = build_drawn(EnvSection(id='CartPole-v1'))\n"
        "envs.reset(0)\n"
        "frames_of(env, 'CartPole-v1')()\n"
    )
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert "EnvError: CartPole-v1 failed to be drawn: DependencyNotInstalled: pygame" in said.stderr
