import pytest
import torch

from cost_aware_trainer.distributed.compression.quantisation import SCALE_BYTES, BlockCodec


@pytest.fixture(params=[8, 4])
def codec(request):
    return BlockCodec(request.param)


def gradient(rows=3, elements=1024, seed=0):
    chosen = torch.randn(rows, elements, generator=torch.Generator().manual_seed(seed))
    # blocks of very different magnitudes, as layers' gradients are
    return chosen * torch.logspace(-9, 2, elements // 256).repeat_interleave(256)


def test_what_is_decoded_and_what_is_left_add_up_to_what_was_encoded(codec):
    values, left = gradient(), gradient()
    decoded = codec.decode(codec.encode(left), 1024)
    # to the rounding of fp32, relative to the value
    torch.testing.assert_close(decoded + left, values, rtol=1e-6, atol=0)


def test_no_error_is_larger_than_half_a_step_of_its_block(codec):
    values, left = gradient(), gradient()
    codec.encode(left)
    step = values.view(3, -1, codec.block).abs().amax(-1, keepdim=True) / codec.largest_code
    # a bf16 scale is off by up to 2^-9, which the largest code multiplies
    assert (left.view(3, -1, codec.block).abs() <= step * (0.5 + codec.largest_code / 512 + 0.01)).all()


def test_a_row_takes_the_bytes_that_it_should(codec):
    encoded = codec.encode(gradient())
    assert (
        encoded.shape == (3, codec.row_bytes(1024)) == (3, 1024 * codec.bits // 8 + 1024 // codec.block * SCALE_BYTES)
    )
    assert encoded.dtype == torch.uint8


def test_neighbours_in_a_byte_do_not_disturb_each_other():
    codec = BlockCodec(4, block=16)
    values = torch.arange(-7, 9).float().clamp(max=7).repeat(1, 4)
    assert torch.equal(codec.decode(codec.encode(values.clone()), 64), values)


def test_zeros_stay_zeros(codec):
    values = torch.zeros(1, 256)
    assert torch.equal(codec.decode(codec.encode(values), 256), torch.zeros(1, 256))
    assert torch.equal(values, torch.zeros(1, 256))


def test_magnitudes_too_small_for_a_scale_wait(codec):
    values = torch.full((1, 256), 1e-39)
    decoded = codec.decode(codec.encode(values), 256)
    assert torch.equal(decoded, torch.zeros(1, 256))
    assert (values > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_diverged_block_stays_diverged_and_alone(codec, bad):
    values = gradient(1, 512)
    values[0, 300] = bad
    finite = codec.decode(codec.encode(values), 512).isfinite()
    block = slice(300 // codec.block * codec.block, (300 // codec.block + 1) * codec.block)
    assert not finite[0, block].any()
    assert finite.sum() == 512 - codec.block


@pytest.mark.parametrize(("bits", "block"), [(2, 256), (16, 256), (4, 3), (8, -2)])
def test_what_cannot_be_packed_is_refused(bits, block):
    with pytest.raises(ValueError, match=r"bits|block"):
        BlockCodec(bits, block)
