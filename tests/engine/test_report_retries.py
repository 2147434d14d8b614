"""An allocator that gives back all it keeps to find room: the report counts that, and says what helps."""

import fake_cuda
import harness
import zoo
from harness import ours, run


class RetriesIn(zoo.PlainClassifier):
    """The allocator tries again in these batches."""

    def __init__(self, *batches):
        super().__init__(zoo.MLP())
        self.batches = batches

    def training_step(self, batch, batch_idx):
        fake_cuda.RETRIES[0] = 3 * sum(there <= batch_idx for there in self.batches)
        return super().training_step(batch, batch_idx)


def test_retries_of_a_step_are_reported_with_the_remedy(monkeypatch):
    fake_cuda.trainers_on_gpus(monkeypatch)
    used = ours(num_microbatches=2, plan=harness.single(6, 2))
    report = run(used, RetriesIn(5, 8), zoo.make_batches("mlp", 9), devices=2, watch=False).report
    assert report is not None
    assert report["alloc_retries"] == [3, 3]
    text = " ".join(str(report).split())
    assert "6 allocations tried again" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
