"""A film of an episode: GIF by Pillow, which matplotlib brings, or MP4 by imageio-ffmpeg."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from impala_async.envs.faults import Blame, tell_stderr
from impala_async.errors import ConfigError, EnvError, plain
from impala_async.files import beside, check_file, unwritten
from impala_async.user_code import UserCode

Frame = NDArray[np.uint8]
# Where an environment does not say.
USUAL_FRAMES_PER_S = 30.0
MOST_GIF_BYTES = 512 << 20
MOST_SAID_BYTES = 2000


class Film(Protocol):
    def add(self, frame: Frame) -> None: ...

    def close(self) -> None:
        """Write what is left of it; there is a frame at least."""

    def discard(self) -> None:
        """Nobody wants it any more, if it is not closed."""


class Gif:
    def __init__(self, path: Path, frames_per_s: float) -> None:
        from PIL import Image

        self._path, self._image = path, Image
        self._frames: list[Any] = []
        self._num_bytes = 0
        # Its unit is a hundredth of a second, and players take less than two for ten.
        self._frame_ms = 10 * max(2, round(100 / frames_per_s))

    def add(self, frame: Frame) -> None:
        if self._num_bytes > MOST_GIF_BYTES:
            return
        # With its own colours, a third of the memory, and ten times faster than Pillow's usual way.
        fast = self._image.Quantize.FASTOCTREE
        self._frames.append(self._image.fromarray(frame).quantize(method=fast))
        self._num_bytes += frame.size // 3
        if self._num_bytes > MOST_GIF_BYTES:
            last = f"ends after {len(self._frames)} steps, as all of it is in memory at first"
            tell_stderr(f"--video: a .gif {last}; an .mp4 has no such end")

    def close(self) -> None:
        first, *others = self._frames
        how = {"save_all": True, "append_images": others, "loop": 0}
        first.save(self._path, "GIF", duration=self._frame_ms, **how)

    def discard(self) -> None:
        self._frames.clear()


class Mp4:
    """Frames go to a process of ffmpeg, whose exit code alone says whether the film is whole."""

    def __init__(self, path: Path, frames_per_s: float) -> None:
        self._path, self._frames_per_s = path, frames_per_s
        self._ffmpeg: subprocess.Popen[bytes] | None = None
        self._shape: tuple[int, ...] = ()
        # A pipe could get full while nobody reads it.
        self._said: IO[bytes] = TemporaryFile()  # noqa: SIM115

    def add(self, frame: Frame) -> None:
        if self._ffmpeg is None:
            self._shape = frame.shape
            self._ffmpeg = self._start(*frame.shape[:2])
        if frame.shape != self._shape:
            raise OSError(f"a picture of {frame.shape} follows one of {self._shape}")
        assert self._ffmpeg.stdin is not None
        try:
            self._ffmpeg.stdin.write(frame.tobytes())
        except BrokenPipeError:  # it has ended, and said why
            self.close()
            raise

    def close(self) -> None:
        assert self._ffmpeg is not None
        self._ffmpeg.communicate()
        if self._ffmpeg.returncode != 0:
            self._said.seek(0)
            said = self._said.read(MOST_SAID_BYTES)
            why, full = " ".join(said.decode(errors="replace").split()), os.strerror(errno.ENOSPC)
            if full in why:
                raise OSError(errno.ENOSPC, full)
            raise OSError(errno.EIO, plain(why) or "ffmpeg was ended before it was done")

    def discard(self) -> None:
        self._said.close()
        if self._ffmpeg is not None and self._ffmpeg.returncode is None:
            self._ffmpeg.kill()
            self._ffmpeg.communicate()

    def _start(self, height: int, width: int) -> "subprocess.Popen[bytes]":
        from imageio_ffmpeg import get_ffmpeg_exe

        of_frames = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {self._frames_per_s} -i -"
        # The codec takes even numbers of pixels alone.
        even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"
        of_film = f"-an -vf {even} -vcodec libx264 -pix_fmt yuv420p -crf 25 -f mp4"
        words = f"-y -loglevel error {of_frames} {of_film}".split()
        # In a group of its own: a Ctrl-C is for us.
        how: dict[str, Any] = {"stdin": subprocess.PIPE, "process_group": 0}
        how |= {"stdout": subprocess.DEVNULL, "stderr": self._said}
        return subprocess.Popen([get_ffmpeg_exe(), *words, str(self._path)], **how)


KINDS: dict[str, Callable[[Path, float], Film]] = {".gif": Gif, ".mp4": Mp4}


def check_film(path: Path) -> None:
    """Raise ConfigError, before anything is played, where no film can be written."""
    if path.suffix not in KINDS:
        raise ConfigError(f"--video: wants a name that ends in .gif or .mp4, got {path}")
    check_file("--video", path)
    with UserCode(f"--video: {path}", "for want of a writer; a .gif needs none"):
        if path.suffix == ".mp4":
            import imageio_ffmpeg

            imageio_ffmpeg.get_ffmpeg_exe()


@contextmanager
def film(path: Path, frames_per_s: float) -> Iterator[Film]:
    """A film that is there when all of it is; else `unwritten` tells why not."""
    whole = path.resolve()  # a link stays where it is
    partial = beside(whole)
    opened = KINDS[path.suffix](partial, frames_per_s)
    try:
        yield opened
        opened.close()
        partial.replace(whole)
    except OSError as error:
        raise unwritten("--video", path, error) from None
    finally:
        opened.discard()
        # Where none could be written, none can be removed.
        with suppress(OSError):
            partial.unlink()


def frames_of(env: Any, env_id: str) -> Callable[[], Frame]:
    """Draws the environment as it is now; EnvError where it gives no picture."""
    wants = "a picture as env.kwargs.render_mode rgb_array gives it (height, width, 3, uint8)"

    def draw() -> Frame:
        with Blame(env_id, "to be drawn"):
            drawn = env.render()
        frame = np.asarray(drawn)
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            looks = type(drawn).__name__
            if isinstance(drawn, np.ndarray):
                looks = f"an array of shape {drawn.shape} and {drawn.dtype}"
            raise EnvError(f"{env_id}: --video: wants {wants} from its render, got {looks}")
        return frame

    return draw


def frames_per_s(env: Any) -> float:
    found = (getattr(env, "metadata", None) or {}).get("render_fps")
    return float(found) if isinstance(found, int | float) and found > 0 else USUAL_FRAMES_PER_S
