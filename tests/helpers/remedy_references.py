"""Published remedies as plain loops in float64, after the papers and their authors' code, independent of jaxaudit."""

import math
from dataclasses import dataclass

import numpy as np


class AdamReference:
    """Computes Adam's direction (Kingma and Ba, 2015), one update after another."""

    def __init__(self, size, beta1=0.9, beta2=0.999, epsilon=1e-8):
        self.first, self.second, self.count = np.zeros(size), np.zeros(size), 0
        self.betas, self.epsilon = (beta1, beta2), epsilon

    def direction(self, gradient):
        beta1, beta2 = self.betas
        self.count += 1
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient**2
        first, second = self.first / (1 - beta1**self.count), self.second / (1 - beta2**self.count)
        return first / (np.sqrt(second) + self.epsilon)


def six_sigma_reference(losses, norms, sigmas, window=128):
    """OLMo-core's `SkipStepOptimizer`: whether each update is applied, and each decision's distance from the threshold.

    Once the remedy acts, it skips values that are not finite and, unlike the original, does not remember them.
    """
    kept, keep, margins = [], [], []
    for latest in zip(losses, norms, strict=True):
        finite = bool(np.isfinite(latest).all())
        if len(kept) + 1 < window // 2:
            keep.append(True)
        elif not finite:
            keep.append(False)
        else:
            recent = np.array(kept[-window:])
            above = np.array(latest) - recent.mean(0) - sigmas * recent.std(0, ddof=1)
            keep.append(bool((above <= 0).all()))
            margins.append(abs(above.max()))
        if finite:
            kept.append(latest)
    return keep, margins


def zclip_reference(gradients, threshold, alpha=0.97, warmup=25, epsilon=1e-6):
    """ZClip (Kumar et al., 2025), "zscore" with "adaptive_scaling": the gradients, and the indices of clipped ones."""
    buffer, outputs, clipped, mean, variance = [], [], [], None, None
    for index, gradient in enumerate(gradients):
        norm = np.linalg.norm(gradient)
        outputs.append(gradient)
        if mean is None:
            buffer.append(norm)
            if len(buffer) == warmup:
                mean = sum(buffer) / warmup
                variance = sum((x - mean) ** 2 for x in buffer) / warmup
            continue
        std = math.sqrt(variance)
        z = (norm - mean) / (std + epsilon)
        if z > threshold:
            limit = mean + threshold * std / (z / threshold)
            outputs[-1] = gradient * (limit / (norm + epsilon))
            clipped.append(index)
            norm = limit
        mean = alpha * mean + (1 - alpha) * norm
        variance = alpha * variance + (1 - alpha) * (norm - mean) ** 2
    return np.array(outputs), clipped


def adagc_reference(gradients, tensors, relative, beta=0.98, warmup=100, absolute=1.0):
    """AdaGC (Wang et al., 2025, Algorithm 1), with t counted from 1: the clipped gradients."""
    gamma, outputs = [0.0] * len(tensors), []
    for t, gradient in enumerate(gradients, start=1):
        clipped = gradient.copy()
        for index, tensor in enumerate(tensors):
            if t < warmup:
                clipped[tensor] *= min(absolute / np.linalg.norm(gradient), 1.0)
                norm = np.linalg.norm(clipped[tensor])
                gamma[index] = norm if t == 1 else min(gamma[index], norm)
            else:
                clipped[tensor] *= min(relative * gamma[index] / np.linalg.norm(gradient[tensor]), 1.0)
                gamma[index] = beta * gamma[index] + (1 - beta) * np.linalg.norm(clipped[tensor])
        outputs.append(clipped)
    return np.array(outputs)


@dataclass
class SpamReference:
    """The results of SPAM, `[updates, size]` each. The directions are without the factor of its warm-up."""

    directions: np.ndarray
    first: np.ndarray
    second: np.ndarray
    clipped: np.ndarray


def spam_reference(gradients, threshold, period=500, accumulation=20):
    """SPAM (Huang et al., 2025), as in its authors' code, with Adam's bias corrections."""
    adam, directions, first, second, clipped = AdamReference(gradients.shape[1]), [], [], [], []
    for number, gradient in enumerate(gradients, start=1):
        if number % period == 0:
            adam.first, adam.second = np.zeros_like(adam.first), np.zeros_like(adam.second)
        spiked = np.zeros(gradient.shape, bool)
        if number >= accumulation and number % period >= accumulation:
            spiked = gradient**2 > threshold * adam.second
        limit = np.sign(gradient) * np.sqrt(threshold * adam.second)
        directions.append(adam.direction(np.where(spiked, limit, gradient)))
        first.append(adam.first)
        second.append(adam.second)
        clipped.append(spiked)
    return SpamReference(*map(np.array, (directions, first, second, clipped)))
