"""Batches that would show a wrong weighting.

They are unkind on purpose: padded, with one sample that has no padding at all (Hugging Face models then take another
mask path), and with a number of targets that differs much between samples, so that weighing microbatches by samples
gives wrong numbers.
"""

import torch
from torch import Tensor

VOCAB = 96

Batch = dict[str, Tensor]


def _padding(generator, samples, length):
    """A right-padded attention mask; sample 0 has no padding."""
    lengths = torch.randint(length // 2, length + 1, (samples,), generator=generator)
    lengths[0] = length
    return (torch.arange(length)[None, :] < lengths[:, None]).long()


def causal_batch(generator, samples, length):
    """Prompts of unequal length are not learned (-100), so each sample has its own number of targets."""
    mask = _padding(generator, samples, length)
    ids = torch.randint(2, VOCAB, (samples, length), generator=generator) * mask
    ends = mask.sum(1)
    prompts = (torch.rand(samples, generator=generator) * (ends - 2)).long()  # leaves one target at least
    prompts[0] = length - 3  # the sample without padding has few targets: samples and targets weigh differently
    learned = (mask == 1) & (torch.arange(length)[None, :] >= prompts[:, None])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~learned, -100)}


def seq2seq_batch(generator, samples, length):
    mask = _padding(generator, samples, length)
    ids = torch.randint(2, VOCAB, (samples, length), generator=generator) * mask
    target_length = length - 4
    labels = torch.randint(2, VOCAB, (samples, target_length), generator=generator)
    keep = torch.randint(1, target_length + 1, (samples,), generator=generator)
    keep[0] = 1
    labels = labels.masked_fill(torch.arange(target_length)[None, :] >= keep[:, None], -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classification_batch(generator, samples, length):
    mask = _padding(generator, samples, length)
    ids = torch.randint(2, VOCAB, (samples, length), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (samples,), generator=generator)}


def vector_batch(generator, samples, length):
    x = torch.randn(samples, 8, generator=generator)
    return {"x": x, "y": torch.randint(0, 5, (samples,), generator=generator)}


def sequence_batch(generator, samples, length):
    x = torch.randn(samples, length, 8, generator=generator)
    return {"x": x, "y": torch.randint(0, 5, (samples,), generator=generator)}


def image_batch(generator, samples, length):
    """For Hugging Face's classifiers of images."""
    pixels = torch.randn(samples, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (samples,), generator=generator)}


def segmentation_batch(generator, samples, length):
    """A class for every pixel; most of the first sample's are not known (-100)."""
    y = torch.randint(0, 5, (samples, 8, 8), generator=generator)
    y[0, 1:] = -100
    return {"x": torch.randn(samples, 3, 8, 8, generator=generator), "y": y}


def voting_batch(generator, samples, length):
    """Each sample has an opinion on which blocks are to be left out."""
    keep = torch.rand(samples, 4, generator=generator) < 0.7
    return vector_batch(generator, samples, length) | {"keep": keep}
