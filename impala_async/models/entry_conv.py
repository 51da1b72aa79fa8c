"""The first convolution of an image, which takes pixels as they lie in memory.

An image of Atari has 28,224 bytes, and the first convolution of the Nature DQN 8,192 weights: what
can be done to weights is not done to each image.

N images, C channels, H height, W width
"""

import torch
from torch import Tensor, nn

from impala_async.models.leaves import LARGEST_BYTE, dtype_of_convolutions

WORD = 4


class EntryConv(nn.Conv2d):
    """Computes what `nn.Conv2d` would of `[N, C, H, W]` floats, or of bytes as shares of 255."""

    def forward(self, image: Tensor) -> Tensor:
        dtype = dtype_of_convolutions(image.device)
        weight, stride = self.weight, self.stride
        if image.dtype == torch.uint8:
            # Actors have these weights rounded: they are divided as that, here and there.
            weight = weight.to(dtype) / LARGEST_BYTE
        if self._has_squares(image):
            image, stride = _in_squares(image), (1, 1)
            weight = nn.functional.pixel_unshuffle(weight, WORD)
        # Convolutions are up to twice as fast over this order, which costs least to make of bytes.
        image = image.contiguous(memory_format=torch.channels_last).to(dtype)
        return nn.functional.conv2d(image, weight, self.bias, stride, self.padding)

    def _has_squares(self, image: Tensor) -> bool:
        """Whether squares of 4 x 4 bytes may be taken for one pixel of 16 times the channels.

        The kernel is as much smaller then, its gradient takes half the time, and four bytes are
        moved as one word."""
        if image.dtype != torch.uint8 or self.stride != (WORD, WORD):
            return False
        if any(self.padding) or any(size % WORD for size in self.kernel_size):
            return False
        are_words = image.shape[3] % WORD == 0 and image.storage_offset() % WORD == 0
        # An exported graph may run where bytes have no other view.
        return image.is_contiguous() and are_words and not torch.compiler.is_compiling()


def _in_squares(image: Tensor) -> Tensor:
    """`pixel_unshuffle`, in the order of memory that convolutions like, four bytes at a time.

    Rows that fill no square are left out, as the convolution would leave them out."""
    num_images, num_channels, height, width = image.shape
    rows, columns = height // WORD, width // WORD
    words: Tensor = image[:, :, : rows * WORD].view(torch.int32).unflatten(2, (rows, WORD))
    squares = words.permute(0, 2, 4, 1, 3).contiguous().view(torch.uint8)
    shape = num_images, rows, columns, num_channels * WORD * WORD
    return squares.view(shape).permute(0, 3, 1, 2)
