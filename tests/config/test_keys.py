from impala_async.config.keys import SYNONYMS, key_like


def test_each_is_a_key_of_ours_and_no_name_stands_twice():
    for key in SYNONYMS:
        assert key_like(key) == key
    names = [name for names in SYNONYMS.values() for name in names.split()]
    assert len(names) == len(set(names))


def test_names_of_other_libraries_are_known():
    assert key_like("ent_coef") == key_like("entropy_coeff") == "algorithm.entropy_cost"
    assert key_like("Learning-Rate") == "algorithm.lr"
    assert key_like("xyzzy") is None
