"""The Inception score."""

import torch


class InceptionScore:
    """exp of the mean KL divergence of predictions from their mean, over splits of a stream, averaged over splits.

    Args:
        split: predictions per split; 5000 in the ADM suite. Splits follow the order of the stream, so shuffle what is
            sorted by class.

    Raises:
        ValueError: a split that is not positive.
    """

    def __init__(self, split: int = 5000) -> None:
        if split < 1:
            raise ValueError(f"split={split} must be positive.")
        self.split = split
        self.count = 0
        """Predictions seen so far."""
        self._scores: list[float] = []
        self._in_split = 0
        self._probabilities = torch.zeros((), dtype=torch.float64)
        self._negative_entropy = torch.zeros((), dtype=torch.float64)

    def update(self, probabilities: torch.Tensor) -> None:
        """Take in predictions (n, classes), each row summing to 1."""
        rest = probabilities.detach().double().cpu()
        self.count += len(rest)
        while len(rest):
            part, rest = rest[: self.split - self._in_split], rest[self.split - self._in_split :]
            self._probabilities = self._probabilities + part.sum(dim=0)
            self._negative_entropy = self._negative_entropy + torch.xlogy(part, part).sum()
            self._in_split += len(part)
            if self._in_split == self.split:
                self._scores.append(self._score())
                self._in_split = 0
                self._probabilities = torch.zeros((), dtype=torch.float64)
                self._negative_entropy = torch.zeros((), dtype=torch.float64)

    def compute(self) -> float:
        """The score; a last split that is not full counts like a full one.

        Raises:
            ValueError: there were no predictions.
        """
        scores = [*self._scores, self._score()] if self._in_split else self._scores
        if not scores:
            raise ValueError("There are no predictions to compute an Inception score of.")
        return sum(scores) / len(scores)

    def _score(self) -> float:
        marginal = self._probabilities / self._in_split
        divergence = self._negative_entropy / self._in_split - torch.xlogy(marginal, marginal).sum()
        return float(divergence.exp())
