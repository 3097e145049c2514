"""Wordings of the values of E2E fields, for values that people do not write verbatim.

Each wording occurs in at least five training texts of E2E that have the field, and more of these have the value than
any other: "low prices" is not a wording of cheap, since more of its texts have less than £ 20. Wordings are not rules:
the meaning depends on the words around, which the classifiers and `difflm.annotators.e2e_fields` read.
"""

_YOUNG = ("family", "kid", "kids", "child", "children")
_NEAR = (
    "near", "near the", "near to", "nearby", "close to", "close to the", "next to", "next to the", "by", "by the",
    "beside", "across from", "not far from", "around", "near the riverside and", "near the city centre and",
)  # fmt: skip
_UNFRIENDLY = tuple(f"{no} {who} friendly" for no in ("not", "non", "non -", "not a", "Not") for who in _YOUNG)
_UNFRIENDLY += tuple(f"not {who} - friendly" for who in _YOUNG)

WORDINGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Type", "coffee shop"): ("coffee shop", "coffee shops", "coffee house"),
    ("Type", "pub"): ("pub", "Pub"),
    ("Type", "restaurant"): ("restaurant", "restaurants"),
    ("price", "cheap"): ("cheap", "cheaply", "Cheap"),
    ("price", "moderate"): (
        "moderate", "moderately", "Moderate", "Moderately", "mid price", "mid priced", "mid - priced", "medium price",
        "medium prices", "medium priced", "medium - priced", "mid range", "mid - range",
    ),
    ("price", "high"): (
        "expensive", "Expensive", "pricey", "costly", "high price", "high prices", "high priced", "high - priced",
        "highly priced", "high end", "high - end", "high cost", "higher prices", "price range is high",
        "prices are high",
    ),
    ("price", "less than £ 20"): (
        "less than £ 20", "less than 20", "less than twenty pounds", "under £ 20", "under 20", "below £ 20",
        "lower than 20",
    ),
    ("price", "£ 20 - 25"): (
        "20 - 25", "20 - £ 25", "20- £ 25", "20 to 25", "20 and 25", "£ 20 to £ 25", "between £ 20 and £ 25",
    ),
    ("price", "more than £ 30"): (
        "more than £ 30", "more than 30", "over £ 30", "over 30", "above £ 30", "above 30", "higher than £ 30",
        "higher than 30", "greater than £ 30", "from £ 30",
    ),
    ("customer rating", "low"): (
        "low customer rating", "low customer ratings", "low rating", "low ratings", "low rated", "low - rated",
        "low reviews", "low customer reviews", "rating is low", "ratings are low", "rated low", "poor ratings",
        "poor customer ratings", "poor reviews", "poor customer reviews", "lower ratings", "lower customer rating",
        "Low rated", "Low ratings", "Low customer rating", "poorly rated",
    ),
    ("customer rating", "average"): (
        "average customer rating", "average customer ratings", "average rating", "average ratings", "average rated",
        "average - rated", "average reviews", "average customer reviews", "rating is average", "ratings are average",
        "rated average", "Average rating", "Average rated", "Average customer rating", "averagely rated",
    ),
    ("customer rating", "high"): (
        "high customer rating", "high customer ratings", "high rating", "high ratings", "high rated", "high - rated",
        "high reviews", "high customer reviews", "rating is high", "ratings are high", "rated high", "highly rated",
        "highly - rated", "rated highly", "High rated", "High customer rating", "High customer ratings",
        "highly recommended", "excellent rating", "excellent reviews", "great customer ratings",
        "great customer reviews",
    ),
    ("customer rating", "1 out of 5"): (
        "1 out of 5", "1 out 5", "1 of 5", "rating of 1", "rated 1", "rating is 1", "one out of five", "rating of one",
    ),
    ("customer rating", "3 out of 5"): (
        "3 out of 5", "3 out of five", "3 out 5", "3 of 5", "3 stars", "rating of 3", "rated 3", "rating is 3",
        "three out of five", "three stars", "rating of three", "rated three",
    ),
    ("customer rating", "5 out of 5"): (
        "5 out of 5", "5 out 5", "5 of 5", "5 star", "5 - star", "rating of 5", "rated 5", "rating is 5",
        "five out of five", "five star", "five stars", "five - star", "rating of five", "rated five",
    ),
    ("area", "city centre"): (
        "city centre", "city center", "city Centre", "City Centre", "centre of the city", "center of the city",
        "heart of the city", "middle of the city", "centre of city", "center of city", "town centre", "center of town",
    ),
    ("area", "riverside"): ("riverside", "Riverside", "river", "River", "river side", "riverfront"),
    ("family friendly", "yes"): (
        "family friendly", "Family friendly", "Family - friendly", "kid friendly", "kid - friendly", "kids friendly",
        "kids - friendly", "child friendly", "child - friendly", "children friendly", "children - friendly",
        "for families", "for the family", "for the whole family", "for kids", "welcomes families", "welcomes children",
        "welcomes kids", "allows children", "families are welcome", "children are welcome", "kids are welcome",
        "family restaurant", "family pub", "family coffee shop", "family atmosphere",
    ),
    ("family friendly", "no"): (
        *_UNFRIENDLY, "non - family - friendly", "not a family - friendly", "no kids", "no children", "adult", "adults",
        "adults only", "adult only", "adult - only", "adults - only", "not for families", "not for children",
        "not for kids", "children are not allowed", "children are not welcome", "not suitable for children",
        "not suitable for families", "not allow children", "not welcome children", "not family oriented",
        "not cater to families", "no family friendly", "isn 't family friendly", "isn 't kid friendly",
    ),
}  # fmt: skip


def wordings(field: str, value: str) -> tuple[str, ...]:
    """Return the wordings of a value; none for fields whose value people write verbatim."""
    if field == "near":
        return tuple(f"{near} {value}" for near in _NEAR)
    return WORDINGS.get((field, value), ())
