import json
from collections import Counter
from pathlib import Path
import dlrover.rl as rl
class Reader(rl.BaseWorkload):
    def count(self, lines):
        return dict(Counter(word for line in lines for word in line.lower().split()))
class Librarian(rl.BaseWorkload):
    counts = {}
    def add(self, parts):
        self.counts = dict(sum(map(Counter, parts), Counter(self.counts)))
        return max(self.counts, key=self.counts.get)
    def state_dict(self):
        return {"counts": self.counts}
    def load_state_dict(self, state):
        self.counts = state["counts"]
class Census(rl.BaseTrainer):
    def init(self): self.state["top"] = ""
    def fit(self):
        for step in self.steps(len(self.config.pages)):
            (self.state["top"],) = self.RG_ACTOR.add(rl.Replicate(self.RG_READER.count(rl.Shard(list(self.config.pages[step - 1])))))
        (self.job_dir / "top.json").write_text(json.dumps(self.state["top"]))
job = rl.RLJobBuilder().device_type("CPU").config({"pages": [["a cat", "a dog", "a bird"], ["the cat", "the cat sat"]]}).trainer(Census).actor(Librarian).role("reader", Reader).total(2).build()
status = job.submit("census", local=True); print(status.phase, json.loads((Path(status.folder) / "top.json").read_text()))
