"""What a text says of a restaurant: hand-written sentences for each rule, and properties that hold for all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difflm.annotators.e2e_fields import FIELDS, expresses, normalise, verbatim
from difflm.data.words import split_words
from difflm.errors import UsageError
from tests.support.corpora import DATA, needs_e2e

SAYS = [
    ("The Mill is a pub.", "name", "The Mill"),
    ("Near Café Rouge, The Mill serves wine.", "name", "The Mill"),
    ("Brown's Cambridge is cheap.", "name", "Browns Cambridge"),
    ("Zizzi's pub welcomes families.", "name", "Zizzi"),
    ("There is a place near Burger King called The Eagle.", "name", "The Eagle"),
    ("The Mill is near Café Rouge.", "near", "Café Rouge"),
    ("The Mill is next to the Burger King.", "near", "Burger King"),
    ("The Mill is close to the river and Burger King.", "near", "Burger King"),
    ("The Mill is a pub. Café Rouge is nearby.", "near", "Café Rouge"),
    ("Loch Fyne is in the Ranch area.", "near", "Ranch"),
    ("The Eagle is near the Indian restaurant, The Rice Boat.", "near", "The Rice Boat"),
    ("Aromi is a coffee-shop.", "Type", "coffee shop"),
    ("Aromi is a café by the river.", "Type", "coffee shop"),
    ("Aromi is a local pub.", "Type", "pub"),
    ("Aromi is a restaurant.", "Type", "restaurant"),
    ("Aromi serves British food.", "food", "English"),
    ("Aromi has sushi.", "food", "Japanese"),
    ("Aromi is a fast-food place.", "food", "Fast food"),
    ("Aromi sells pasta.", "food", "Italian"),
    ("Aromi has low prices.", "price", "cheap"),
    ("Aromi is inexpensive.", "price", "cheap"),
    ("Aromi is mid-priced.", "price", "moderate"),
    ("The price range is moderate.", "price", "moderate"),
    ("Its prices are high and its rating is low.", "price", "high"),
    ("It is a bit high in price.", "price", "high"),
    ("Meals cost less than £20.", "price", "less than £ 20"),
    ("Meals are under twenty pounds.", "price", "less than £ 20"),
    ("Dishes cost £20-£25.", "price", "£ 20 - 25"),
    ("Dishes cost between 20 and 25 pounds.", "price", "£ 20 - 25"),
    ("Prices are over £30.", "price", "more than £ 30"),
    ("Prices start at £30.", "price", "more than £ 30"),
    ("Its prices are high and its rating is low.", "customer rating", "low"),
    ("It is poorly rated.", "customer rating", "low"),
    ("It has an average customer rating.", "customer rating", "average"),
    ("The Mill is an average pub.", "customer rating", "average"),
    ("It is highly rated.", "customer rating", "high"),
    ("The price is low and the customer rating is high.", "customer rating", "high"),
    ("It has one star.", "customer rating", "1 out of 5"),
    ("It is rated 1 out of 5 stars.", "customer rating", "1 out of 5"),
    ("It is a three-star place.", "customer rating", "3 out of 5"),
    ("Customers rate it five out of five.", "customer rating", "5 out of 5"),
    ("It lies by the river.", "area", "riverside"),
    ("It is in the Riverside area.", "area", "riverside"),
    ("It is in the center of the city.", "area", "city centre"),
    ("It is in the city centre.", "area", "city centre"),
    ("It is family-friendly.", "family friendly", "yes"),
    ("It welcomes children.", "family friendly", "yes"),
    ("Kids are welcome.", "family friendly", "yes"),
    ("It is not only kid friendly but cheap.", "family friendly", "yes"),
    ("It is not expensive and family friendly.", "family friendly", "yes"),
    ("It isn't family-friendly.", "family friendly", "no"),
    ("A non-family-friendly pub.", "family friendly", "no"),
    ("No kids.", "family friendly", "no"),
    ("Children are not allowed.", "family friendly", "no"),
    ("It is for adults only.", "family friendly", "no"),
    ("It is a child-free pub.", "family friendly", "no"),
]

SAYS_NOT = [
    ("The Eagle is near The Rice Boat.", "name", "The Rice Boat"),
    ("The Rice Boat is near The Eagle.", "near", "The Rice Boat"),
    ("Café Rouge is a restaurant.", "near", "Café Rouge"),
    ("Near Café Rouge is The Mill.", "near", "The Rice Boat"),
    ("Come to The Mill near Café Rouge.", "near", "The Bakers"),
    ("Aromi is near Rainbow Vegetarian Café.", "Type", "coffee shop"),
    ("Aromi is near Raja Indian Cuisine.", "food", "Indian"),
    ("It does not serve Chinese food.", "food", "Chinese"),
    ("It sells French fries.", "food", "French"),
    ("It has low ratings.", "price", "cheap"),
    ("It is not cheap.", "price", "cheap"),
    ("It is inexpensive.", "price", "high"),
    ("It is highly rated.", "price", "high"),
    ("It has an average customer rating.", "price", "moderate"),
    ("The average price is more than £30.", "price", "moderate"),
    ("It is cheap.", "price", "less than £ 20"),
    ("Dishes cost £20-25.", "price", "less than £ 20"),
    ("It is expensive.", "price", "more than £ 30"),
    ("It has low prices.", "customer rating", "low"),
    ("It has high prices.", "customer rating", "high"),
    ("It is above average.", "customer rating", "average"),
    ("Its average rating is 1 out of 5.", "customer rating", "average"),
    ("It is highly rated.", "customer rating", "5 out of 5"),
    ("It has five stars.", "customer rating", "high"),
    ("It is rated 1 out of 5 stars.", "customer rating", "5 out of 5"),
    ("A meal is £35.", "customer rating", "3 out of 5"),
    ("All Bar One is a bar with star dishes.", "customer rating", "1 out of 5"),
    ("It is north of the city centre.", "area", "city centre"),
    ("It is outside the city centre.", "area", "city centre"),
    ("It is in the city centre.", "area", "riverside"),
    ("It is not family-friendly.", "family friendly", "yes"),
    ("It isn ' t kid friendly.", "family friendly", "yes"),
    ("It is a pub.", "family friendly", "yes"),
    ("It is a pub.", "family friendly", "no"),
    ("It is great for children and adults.", "family friendly", "no"),
    ("It is family friendly and not far from Ranch.", "family friendly", "no"),
]


@pytest.mark.parametrize(("text", "field", "value"), SAYS)
def test_a_text_that_says_so(text, field, value):
    assert expresses(split_words(text), field, value)


@pytest.mark.parametrize(("text", "field", "value"), SAYS_NOT)
def test_a_text_that_does_not(text, field, value):
    assert not expresses(split_words(text), field, value)


@given(st.sampled_from(SAYS), st.sampled_from([str.lower, str.upper, str.title]))
def test_case_does_not_matter(example, change):
    text, field, value = example
    words = [change(word) for word in split_words(text)]
    assert expresses(words, field, value)


TEMPLATES = {
    "name": "{} is a place to eat",
    "Type": "it is a {}",
    "food": "it serves {} food",
    "price": "the price range is {}",
    "customer rating": "the customer rating is {}",
    "area": "it is in the {} area",
    "near": "it is near {}",
}


def plain_text(meaning):
    said = [TEMPLATES[field].format(value) for field, value in meaning.items() if field in TEMPLATES]
    if "family friendly" in meaning:
        said.append("it is family friendly" if meaning["family friendly"] == "yes" else "it is not family friendly")
    return " . ".join(said) + " ."


@given(st.fixed_dictionaries({}, optional={field: st.sampled_from(values) for field, values in FIELDS.items()}))
def test_a_text_made_of_a_meaning_says_it_and_nothing_else(meaning):
    words = split_words(plain_text(meaning))
    if meaning.get("name") == meaning.get("near"):
        return  # a place near itself is no meaning
    said = {(field, value) for field, values in FIELDS.items() for value in values if expresses(words, field, value)}
    assert said == set(meaning.items())


@given(st.text(max_size=60))
def test_any_text_has_an_answer(text):
    for field, values in FIELDS.items():
        assert all(expresses(split_words(text), field, value) in (True, False) for value in values)


def test_verbatim_wants_the_words_themselves():
    assert verbatim(["in", "the", "city", "centre"], "area", "city centre")
    assert not verbatim(["in", "the", "city", "center"], "area", "city centre")
    assert not verbatim(["republic"], "Type", "pub")


@pytest.mark.parametrize(
    ("given_", "known"),
    [
        (("eatType", "Pub"), ("Type", "pub")),
        (("type", "COFFEE SHOP"), ("Type", "coffee shop")),
        (("familyFriendly", "Yes"), ("family friendly", "yes")),
        (("kid-friendly", "no"), ("family friendly", "no")),
        (("priceRange", "£20-25"), ("price", "£ 20 - 25")),
        (("price", "less than £20"), ("price", "less than £ 20")),
        (("customerRating", "5 out of 5"), ("customer rating", "5 out of 5")),
        (("customer_rating", "High"), ("customer rating", "high")),
        (("area", "city center"), ("area", "city centre")),
        (("name", "mill"), ("name", "The Mill")),
        (("near", "cafe rouge"), ("near", "Café Rouge")),
        (("Food", "fast-food"), ("food", "Fast food")),
    ],
)
def test_names_people_use_are_understood(given_, known):
    assert normalise(*given_) == known


def test_every_known_value_is_its_own_name():
    assert all(normalise(field, value) == (field, value) for field, values in FIELDS.items() for value in values)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"'Japanese'.*Known: Chinese, English"):
        normalise("food", "japanise")
    with pytest.raises(UsageError, match=r"'price'.*Known: name, Type"):
        normalise("prices", "cheap")


@needs_e2e
def test_the_known_values_are_those_of_the_corpus():
    from difflm.data.corpora import e2e_path, read_e2e

    seen: dict[str, set[str]] = {}
    for pair in read_e2e(e2e_path(DATA, "train")):
        for field, value in pair.fields.items():
            seen.setdefault(field, set()).add(value)
    assert seen == {field: set(values) for field, values in FIELDS.items()}
