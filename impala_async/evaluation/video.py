"""A film of an episode: GIF by Pillow, which matplotlib brings, or MP4 by imageio-ffmpeg."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from impala_async.envs.faults import Blame, tell_stderr
from impala_async.errors import ConfigError, EnvError
from impala_async.files import check_file, unwritten
from impala_async.user_code import UserCode

Frame = NDArray[np.uint8]
# Where an environment does not say.
USUAL_FRAMES_PER_S = 30.0
MOST_GIF_BYTES = 512 << 20


class Film(Protocol):
    def add(self, frame: Frame) -> None: ...

    def close(self) -> None:
        """Write what is left of it; there is a frame at least."""


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


class Mp4:
    def __init__(self, path: Path, frames_per_s: float) -> None:
        self._path, self._frames_per_s = path, frames_per_s
        self._writer: Any = None

    def add(self, frame: Frame) -> None:
        if self._writer is None:
            from imageio_ffmpeg import write_frames

            height, width, _ = frame.shape
            how = {"fps": self._frames_per_s, "macro_block_size": 2, "ffmpeg_log_level": "error"}
            self._writer = write_frames(str(self._path), (width, height), **how)
            self._writer.send(None)
        self._writer.send(np.ascontiguousarray(frame))

    def close(self) -> None:
        self._writer.close()


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
    partial = whole.with_name(f".partial-{path.name}")
    opened = KINDS[path.suffix](partial, frames_per_s)
    try:
        yield opened
        opened.close()
        partial.replace(whole)
    except OSError as error:
        raise unwritten("--video", path, error) from None
    finally:
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
