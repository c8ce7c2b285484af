"""A small vision model on scikit-learn's handwritten digits: torchrun --nproc-per-node=2 train.py --folder checkpoints."""

import argparse

import torch
import torch.nn.functional as F  # noqa: N812  the name the whole field uses
from sklearn.datasets import load_digits
from torch import nn

from cost_aware_trainer import TrainingSession

HELD_OUT_EVERY = 5


def network() -> nn.Module:
    """Two convolutions and a linear map: (samples, 1, 8, 8) to logits (samples, 10)."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def main() -> None:
    """Trains, and prints the held-out accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    is_held_out = torch.arange(len(images)) % HELD_OUT_EVERY == 0
    held_images, held_labels = images[is_held_out], labels[is_held_out]
    images, labels = images[~is_held_out], labels[~is_held_out]
    with TrainingSession(
        model, optimizer, folder=options.folder, samples=len(images), global_samples=64, steps=options.steps
    ) as session:
        for x, y in session.batches(lambda indices: (images[indices], labels[indices])):
            session.step(F.cross_entropy(model(x.to(session.device)), y.to(session.device), reduction="sum"))
        with session.evaluation():
            logits = model(held_images.to(session.device)).cpu()
        session.report_heldout_loss(float(F.cross_entropy(logits, held_labels)))
        accuracy = float((logits.argmax(1) == held_labels).float().mean())
        if session.ranks.is_first:
            print(f"step {session.step_number} accuracy {accuracy:.4f} samples {session.samples_checksum}", flush=True)


if __name__ == "__main__":
    main()
