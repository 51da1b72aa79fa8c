"""Films of episodes: what is in them, and what is told where there can be none."""

import errno
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from bench.probes import Counting
from impala_async.errors import ConfigError, EnvError
from impala_async.evaluation import video
from impala_async.evaluation.video import check_film, film, frames_of, frames_per_s


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
    path.with_name(".partial-film.gif").symlink_to("/dev/full")
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
