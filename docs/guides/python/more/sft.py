import dlrover.rl as rl
from dlrover.python.rl.recipe.tiny import write_tiny_model

model = write_tiny_model("runs/tiny")
colours = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red", "lemon": "yellow"}
plain = [{"prompt": f"The {thing} is ", "response": f"{colour}."} for thing, colour in colours.items()]
asked = [{"messages": [{"role": "user", "content": f"Which colour has {thing}?"},
                       {"role": "assistant", "content": colour}]} for thing, colour in colours.items()]
run = rl.train_sft(model, plain + asked, steps=2, batch_size=4, eval_every=1, optimizer={"lr": 2e-3},
                   data={"eval_share": 0.25})
for step in run.steps:
    print(step["step"], step["loss"], step["eval/loss"], step["eval/perplexity"])
print(run.model, run.summary)
