"""The first convolution of an image, which takes pixels as they lie in memory.

An image of Atari has 28,224 bytes, and the first convolution of the Nature DQN 8,192 weights: what
can be done to weights is not done to each image.

N images, C channels, H height, W width
"""

from functools import cache

import torch
from torch import Tensor, nn

from impala_async.models.leaves import LARGEST_BYTE, dtype_of_convolutions

WORD = 4


class EntryConv(nn.Conv2d):
    """Computes what `nn.Conv2d` would of `[N, C, H, W]` floats, or of bytes as shares of 255."""

    def forward(self, image: Tensor) -> Tensor:
        dtype = dtype_of_convolutions(image.device)
        squares = self.squares(image)
        if squares is not None:
            weight = self.weight_of_squares(dtype)
            return nn.functional.conv2d(squares.to(dtype), weight, self.bias)
        weight = self._weight_of_bytes(dtype) if image.dtype == torch.uint8 else self.weight
        # Convolutions are up to twice as fast over this order, which costs least to make of bytes.
        image = image.contiguous(memory_format=torch.channels_last).to(dtype)
        return nn.functional.conv2d(image, weight, self.bias, self.stride, self.padding)

    def squares(self, image: Tensor) -> Tensor | None:
        """An image whose pixels are 4 x 4 of these bytes, with 16 times the channels; None where
        it may not be taken in place of this one.

        The kernel is as much smaller then, its gradient takes half the time, and four bytes are
        moved as one word."""
        if image.dtype != torch.uint8 or self.stride != (WORD, WORD):
            return None
        if any(self.padding) or any(size % WORD for size in self.kernel_size):
            return None
        are_words = image.shape[3] % WORD == 0 and image.storage_offset() % WORD == 0
        # An exported graph may run where bytes have no other view.
        are_bytes = image.is_contiguous() and are_words and not torch.compiler.is_compiling()
        return _in_squares(image) if are_bytes else None

    def weight_of_squares(self, dtype: torch.dtype) -> Tensor:
        """The weights for `squares`, over which the kernel goes in steps of one."""
        return nn.functional.pixel_unshuffle(self._weight_of_bytes(dtype), WORD)

    def _weight_of_bytes(self, dtype: torch.dtype) -> Tensor:
        # Actors have these weights rounded: they are divided as that, here and there.
        return self.weight.to(dtype) / LARGEST_BYTE


def _in_squares(image: Tensor) -> Tensor:
    """`pixel_unshuffle`, in the order of memory that convolutions like, four bytes at a time.

    Rows that fill no square are left out, as the convolution would leave them out."""
    num_images, num_channels, height, width = image.shape
    # torch copies floats by their places three times as fast as whole numbers of their size.
    words = image.view(num_images, num_channels * height * width).view(torch.float32)
    places = _places(num_channels, height, width // WORD, image.device)
    squares = words.index_select(1, places).view(torch.uint8)
    shape = num_images, height // WORD, width // WORD, num_channels * WORD * WORD
    return squares.view(shape).permute(0, 3, 1, 2)


@cache
@torch.inference_mode(False)
def _places(num_channels: int, height: int, num_words: int, device: torch.device) -> Tensor:
    """Where the words of an image lie, square by square."""
    places = torch.arange(num_channels * height * num_words, device=device)
    used = places.view(num_channels, height, num_words)[:, : height - height % WORD]
    return used.reshape(num_channels, height // WORD, WORD, num_words).permute(1, 3, 0, 2).flatten()
