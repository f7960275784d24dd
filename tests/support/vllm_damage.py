# SPDX-License-Identifier: Apache-2.0
"""An extension of vLLM's workers that damages the next weights on their way into the model."""


class Damage:
    def damage_next_load(self, fault: str, name: str, other: str) -> None:
        model = self.weight_transfer_engine.model
        load = model.load_weights

        def load_damaged(named):
            del model.load_weights
            tensors = dict(named)
            if fault == "dropped":
                del tensors[name]
            elif fault == "swapped":
                tensors[name], tensors[other] = tensors[other], tensors[name]
            elif fault == "stale":
                tensors[name] = tensors[name] / 1.02
            else:
                raise RuntimeError("no such tensor")
            return load(tensors.items())

        model.load_weights = load_damaged
