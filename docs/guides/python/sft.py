import dlrover.rl as rl

rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]
run = rl.train_sft("tiny", rows, steps=2, batch_size=4, learning_rate=1e-3)
print(run.metrics[["loss", "lr"]])
print(run.summary)
print(run.model)
