from impala_async.config.load import key_like
from impala_async.config.synonyms import SYNONYMS, our_key


def test_each_is_a_key_of_ours_and_no_name_stands_twice() -> None:
    for key in SYNONYMS:
        assert key_like(key) == key
    names = [name for names in SYNONYMS.values() for name in names.split()]
    assert len(names) == len(set(names))


def test_names_of_other_libraries_are_known() -> None:
    assert our_key("ent_coef") == our_key("entropy_coeff") == "algorithm.entropy_cost"
    assert our_key("Learning-Rate") == "algorithm.lr"
    assert our_key("xyzzy") is None
