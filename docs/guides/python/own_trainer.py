import random

import dlrover.rl as rl


class Actor(rl.BaseWorkload):
    def inside(self, seeds):
        dice = [random.Random(seed) for seed in seeds]
        return [die.random() ** 2 + die.random() ** 2 < 1 for die in dice]


class PiTrainer(rl.BaseTrainer):
    def init(self):
        self.state["hits"] = 0

    def fit(self):
        for step in self.steps(self.config.steps):
            parts = self.RG_ACTOR.inside([f"{step}/{index}" for index in range(1000)])
            self.state["hits"] += sum(sum(part) for part in parts)
            self.log(step, pi=4 * self.state["hits"] / (1000 * step))
        print("pi is about", 4 * self.state["hits"] / (1000 * step), "see", self.job_dir)


job = rl.RLJobBuilder().device_type("CPU").config({"steps": 2}).trainer(PiTrainer).actor(Actor).total(2).build()
print(job.submit("pi", local=True))
