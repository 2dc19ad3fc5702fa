"""Train against three norms at once, and see what each ball leaves."""

import deat

digits = deat.load_data("digits")
balls = deat.Linf(0.15), deat.L2(0.5), deat.L1(1)
union = deat.Union(*balls, rule="magnitude")  # for each image the ball with the largest first-order rise

for name, threat in {"linf alone": balls[0], "union": union}.items():
    model = deat.build_model("small", in_channels=1, image_size=8)
    result = deat.fit(model, digits.train, method="deat-3", threat=threat, epochs=6, batch_size=64, lr=0.05)
    evaluation = deat.evaluate(result.model, digits, threat=union, attacks=["natural", "pgd-10"], n=200)
    print(f"trained on {name}: {evaluation}")
    for norm, ball in evaluation.balls.items():
        print(f"  in {norm}: {ball.worst:.1%}")
