"""The planted bugs: a module for each harness, which must find all of its own. Tests are parametrized over them."""


def planted() -> dict[str, list[str]]:
    from tests.harness.planted import fuzz, many, model, points, power, runs, soak, writers

    of_power = [f"{row[0]} on {row[1]}" for row in (*power.OF_A_PRODUCER, *power.OF_A_CONSUMER)]
    return {
        "points": list(points.MUTANTS),
        "writers": [*writers.MUTANTS, *writers.MUTANTS_OF_ARRAYS],
        "races": list(writers.MISTAKES),
        "many writers": [*many.MUTANTS, *many.OVERTAKING],
        "power": [*of_power, power.OF_A_RESTART],
        "model": [mutant.name for mutant in model.MUTANTS],
        "fuzz": list(fuzz.MUTANTS),
        "runs": list(runs.MUTANTS),
        "soak": list(soak.MUTANTS),
    }
