"""Losses on the outputs: labels, the teacher's soft labels, its logits, numbers.

A row gets one answer: it is a text, the first token of a word, or a masked token.
"""

import torch
from torch import Tensor
from torch.nn import functional

from compress.data.batches import are_numbers, are_spans, labelled_rows
from compress.data.encoded import IGNORED


def full(x: Tensor) -> Tensor:
    """`x` in float32 if it is in half precision, which is too coarse for sums of exponentials."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def sequence_lengths(mask: Tensor) -> Tensor:
    """The tokens of each sequence of a batch, (sequences,), row after row.

    `mask` is (batch, tokens), 0 for padding, otherwise the number of the token's sequence within its row, from 1 on. A row that
    holds one sequence has ones; the sequences of a packed row (`compress.data.sampler`) follow each other.
    """
    row, token = mask.nonzero(as_tuple=True)
    lengths: Tensor = torch.unique_consecutive(row * (mask.shape[1] + 1) + mask[row, token], return_counts=True)[1]
    return lengths


def mean_over_tokens(rows: Tensor, mask: Tensor) -> Tensor:
    """The mean of `rows` (batch, tokens) over the real tokens of each sequence, then over sequences.

    Values in padding are ignored, even NaN. `mask` is that of `sequence_lengths`.
    """
    numbers = mask.long()
    counts = rows.new_zeros(
        len(rows), rows.shape[1] + 1
    )  # (batch, sequences of a row), the tokens of each; first the padding
    counts.scatter_add_(1, numbers, torch.ones_like(rows))
    weights = 1 / (counts.gather(1, numbers) * (counts[:, 1:] > 0).sum())
    return torch.where(numbers > 0, rows * weights, torch.zeros_like(rows)).sum()


def label_loss(
    logits: Tensor,
    targets: Tensor,
    smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    *,
    of_all: bool = False,
) -> Tensor:
    """Cross-entropy with labels, mean over the rows that have one; 0 if no row has.

    If any number of labels may apply to a row it is the binary cross-entropy of each label, mean over labels and rows. For numbers it
    is the squared error. For questions see `span_loss`.

    Args:
        logits: (rows, labels); for numbers (rows, 1).
        targets: (rows,), a label's index or `IGNORED`; or (rows, labels), 1 if the label applies, 0 if not, or `IGNORED`; or numbers,
            float (rows,), NaN where there is none; or of questions, int (rows, 3).
        smoothing: of rows with one label each: the share of the target that all labels have evenly (Szegedy et al. 2016, section 7).
        class_weights: of rows with one label each: the weight of those of each label, (labels,). The sum is divided by the number of rows.
        of_all: whether the sum over rows, or windows, with a label is divided by the number of all of them.
    """
    if are_spans(targets):
        return span_loss(logits, targets, of_all=of_all)
    if are_numbers(targets):
        known = labelled_rows(targets)
        squares = (full(logits)[:, 0] - torch.where(known, targets, torch.zeros_like(targets))).square()
        return _mean(torch.where(known, squares, torch.zeros_like(squares)).sum(), known, of_all=of_all)
    if targets.ndim == 2:
        known = targets != IGNORED
        each = functional.binary_cross_entropy_with_logits(full(logits), targets.clamp(min=0), reduction="none")
        return _mean(torch.where(known, each, torch.zeros_like(each)).sum(), known, of_all=of_all)
    rows = label_rows(logits, targets, smoothing)
    if class_weights is not None:
        rows = rows * class_weights[targets.clamp(min=0)]
    return _mean(rows.sum(), targets != IGNORED, of_all=of_all)


def label_rows(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross-entropy of each row with its label, (rows,); 0 where it has none. See `label_loss`."""
    rows: Tensor = functional.cross_entropy(
        full(logits), targets, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    return rows


def _mean(sums: Tensor, known: Tensor, *, of_all: bool) -> Tensor:
    return sums / max(1, known.numel()) if of_all else sums / known.sum().clamp(min=1)


def span_loss(logits: Tensor, targets: Tensor, *, of_all: bool = False) -> Tensor:
    """The cross-entropy of an answer's start and of its end among the rows of its window: the mean of both, then over labelled windows.

    0 if no window has a label. Devlin et al. 2019, "BERT", section 4.2.

    Args:
        logits: (rows, 2), of start and end.
        targets: int (rows, 3), 1 for the first row of a window, the row of the start, the row of the end.
        of_all: whether the mean is over all windows.
    """
    ends = targets[:, 1:]
    number = 2 * targets[:, 0].sum() if of_all else ends.sum()
    log_shares = _log_softmax_by_window(full(logits), targets[:, 0].cumsum(0) - 1)
    return -torch.where(ends == 1, log_shares, torch.zeros_like(log_shares)).sum() / number.clamp(min=1)


def soft_span_loss(
    teacher_logits: Tensor, student_logits: Tensor, targets: Tensor, temperature: float, labelled_weight: float = 1.0
) -> Tensor:
    """`T^2 KL(teacher || student)` of where an answer starts and of where it ends: the mean of both, then over windows; 0 if they agree.

    Args:
        teacher_logits: (rows, 2), no gradient.
        student_logits: (rows, 2).
        targets: int (rows, 3), as in `span_loss`.
        temperature: above 0.
        labelled_weight: of windows with a label; that of the others is 1.
    """
    window = targets[:, 0].cumsum(0) - 1
    theirs, ours = (
        _log_softmax_by_window(full(each) / temperature, window) for each in (teacher_logits, student_logits)
    )
    windows = targets[:, 0].sum()
    known = labelled_rows(targets).to(ours.dtype)
    of_window = known.new_zeros(int(windows)).index_add(0, window, known)[window]  # 1 for each row of a labelled window
    rows = (theirs.exp() * (theirs - ours)).sum(dim=-1) * (1 - (1 - labelled_weight) * of_window)
    return temperature**2 * rows.sum() / (2 * windows).clamp(min=1)


def _log_softmax_by_window(logits: Tensor, window: Tensor) -> Tensor:
    """The logarithm of the softmax of each column of `logits` (rows, columns) over the rows of one `window` (rows,), counted from 0."""
    if not len(logits):
        return logits
    windows, places = int(window[-1]) + 1, window[:, None].expand_as(logits)
    most = logits.detach().new_full((windows, logits.shape[1]), -torch.inf)
    shifted = logits - most.scatter_reduce(0, places, logits.detach(), "amax")[window]
    sums = logits.new_zeros(windows, logits.shape[1]).index_add(0, window, shifted.exp())
    return shifted - sums.log()[window]


def soft_label_loss(
    teacher_logits: Tensor, student_logits: Tensor, temperature: float, weights: Tensor | float = 1.0
) -> Tensor:
    """The mean of `soft_label_rows`, each taken `weights` times, (rows,); 0 if they agree."""
    rows = soft_label_rows(teacher_logits, student_logits, temperature)
    return (weights * rows).sum() / max(rows.numel(), 1)


def soft_label_rows(teacher_logits: Tensor, student_logits: Tensor, temperature: float) -> Tensor:
    """`T^2 KL(softmax(teacher / T) || softmax(student / T))` of each row, (rows,).

    The factor `T^2` keeps the size of gradients about the same at every temperature (Hinton et al. 2015, section 2).

    Args:
        teacher_logits: (rows, labels), no gradient.
        student_logits: (rows, labels).
        temperature: above 0; a higher one gives more weight to the labels that the teacher ranks low.
    """
    target = functional.log_softmax(full(teacher_logits) / temperature, dim=-1)
    ours = functional.log_softmax(full(student_logits) / temperature, dim=-1)
    rows: Tensor = (target.exp() * (target - ours)).sum(dim=-1)
    return temperature**2 * rows


def soft_multi_label_loss(
    teacher_logits: Tensor, student_logits: Tensor, temperature: float, weights: Tensor | float = 1.0
) -> Tensor:
    """`T^2 KL(sigmoid(teacher / T) || sigmoid(student / T))` of each label, mean over labels and rows; 0 if they agree.

    It is `soft_label_loss` for rows to which any number of labels may apply: each label is a distribution over yes and no.

    Args:
        teacher_logits: (rows, labels), no gradient.
        student_logits: (rows, labels).
        temperature: above 0.
        weights: of rows and labels, (rows, labels).
    """
    theirs, ours = full(teacher_logits) / temperature, full(student_logits) / temperature
    yes = functional.logsigmoid(theirs) - functional.logsigmoid(ours)
    no = functional.logsigmoid(-theirs) - functional.logsigmoid(-ours)
    each = theirs.sigmoid() * yes + (-theirs).sigmoid() * no
    return temperature**2 * (weights * each).sum() / max(each.numel(), 1)


def soft_number_loss(teacher_numbers: Tensor, student_numbers: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """`(student - teacher)^2`, mean over rows; 0 if they agree. Both are (rows, 1); the teacher's has no gradient.

    `weights` are those of the rows, (rows,).
    """
    rows = (full(student_numbers) - full(teacher_numbers)).square()[:, 0]
    return (weights * rows).sum() / max(rows.numel(), 1)


def soft_loss(
    teacher_logits: Tensor, student_logits: Tensor, targets: Tensor, temperature: float, *, labelled_weight: float = 1.0
) -> Tensor:
    """`soft_span_loss` for questions, `soft_number_loss` for numbers, `soft_multi_label_loss` for (rows, labels), or `soft_label_loss`.

    Of a row, or window, with a label the loss is taken `labelled_weight` times.
    """
    if are_spans(targets):
        return soft_span_loss(teacher_logits, student_logits, targets, temperature, labelled_weight)
    weights = 1.0 if labelled_weight == 1 else 1 - (1 - labelled_weight) * labelled_rows(targets).float()
    if are_numbers(targets):
        return soft_number_loss(teacher_logits, student_logits, weights)
    loss = soft_multi_label_loss if targets.ndim == 2 else soft_label_loss
    return loss(teacher_logits, student_logits, temperature, weights)


def logit_loss(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """The mean of `logit_rows` (XtremeDistil, eq. 12)."""
    rows = logit_rows(teacher_logits, student_logits)
    return rows.sum() / max(rows.numel(), 1)


def logit_rows(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """`1/2 ||student - teacher||^2` of each row, (rows,). Both are (rows, labels); the teacher's has no gradient."""
    return (full(student_logits) - full(teacher_logits)).square().sum(dim=-1) / 2


def total(terms: dict[str, Tensor]) -> Tensor:
    """The sum of the loss terms, a scalar."""
    return torch.stack(list(terms.values())).sum()
