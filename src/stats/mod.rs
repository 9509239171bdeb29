//! Statistics: intervals and tests, each with its source.
//!
//! In: counts. Out: numbers with their uncertainty.

/// A proportion's Wilson score interval at 95 % (Wilson 1927, without continuity correction); `(0, 1)` where n is 0.
pub fn wilson(successes: u64, n: u64) -> (f64, f64) {
    const Z: f64 = 1.959_963_984_540_054;
    if n == 0 {
        return (0.0, 1.0);
    }
    let (successes, n) = (successes as f64, n as f64);
    let share = successes / n;
    let denominator = 1.0 + Z * Z / n;
    let centre = (share + Z * Z / (2.0 * n)) / denominator;
    let half = Z / denominator * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    // At the ends the formula is exact up to rounding.
    let low = if successes == 0.0 {
        0.0
    } else {
        (centre - half).max(0.0)
    };
    let high = if (successes - n).abs() < 0.5 {
        1.0
    } else {
        (centre + half).min(1.0)
    };
    (low, high)
}

/// Two-sided exact McNemar test: the probability, if both systems were equally good, of a split of the discordant pairs
/// at least as uneven as `only_a` to `only_b` (binomial with ½; McNemar 1947). 1 where there are none.
pub fn mcnemar_exact(only_a: u64, only_b: u64) -> f64 {
    let n = only_a + only_b;
    if n == 0 {
        return 1.0;
    }
    let smaller = only_a.min(only_b);
    // Sum of binomial probabilities in logarithms, so that thousands of pairs do not underflow.
    let (mut term, mut sum) = (-(n as f64) * std::f64::consts::LN_2, 0.0_f64);
    for k in 0..=smaller {
        sum += term.exp();
        {
            term += ((n - k) as f64).ln() - ((k + 1) as f64).ln();
        }
    }
    (2.0 * sum).min(1.0)
}

/// Mean and standard deviation in the population's form (divided by n, as NumPy does by default and the papers do); of no
/// value both are 0.
pub fn mean_and_sd(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    if values.is_empty() {
        return (0.0, 0.0);
    }
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / n).sqrt())
}

/// The 2.5th and 97.5th percentile of the mean over `resamples` resamples with replacement (Efron 1979): an interval for the
/// mean of values that are no proportion. The same seed gives the same interval on every machine; of no value it is 0 to 0.
pub fn bootstrap_mean(values: &[f64], resamples: usize, seed: u64) -> (f64, f64) {
    if values.is_empty() || resamples == 0 {
        return (0.0, 0.0);
    }
    let n = values.len() as u64;
    let mut state = seed;
    let mut means: Vec<f64> = (0..resamples)
        .map(|_| {
            let sum: f64 = (0..n)
                .map(|_| {
                    // The upper half of the product is a number below n, evenly drawn but for 2⁻⁶⁴ n.
                    let drawn = (u128::from(split_mix(&mut state)) * u128::from(n)) >> 64;
                    values[usize::try_from(drawn).unwrap_or(0)]
                })
                .sum();
            sum / n as f64
        })
        .collect();
    means.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a place in the list"
        )]
        let place = (share * (resamples - 1) as f64).round() as usize;
        means[place.min(resamples - 1)]
    };
    (at(0.025), at(0.975))
}

/// Steele, Lea and Flood's SplitMix64 (2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The generator's published first numbers from the state 1234567; the interval against the normal approximation, of
    /// which the mean of many values is not far: mean ± 1.96 sd / √n.
    #[test]
    fn bootstrap_of_a_mean() {
        let mut state = 1_234_567;
        assert_eq!(split_mix(&mut state), 6_457_827_717_110_365_317);
        assert_eq!(split_mix(&mut state), 3_203_168_211_198_807_973);
        let values: Vec<f64> = (0..400).map(|number| f64::from(number % 5) / 4.0).collect();
        let (mean, sd) = mean_and_sd(&values);
        let half = 1.96 * sd / 20.0;
        let (low, high) = bootstrap_mean(&values, 10_000, 1);
        assert!(
            (low - (mean - half)).abs() < 0.003 && (high - (mean + half)).abs() < 0.003,
            "{low} {high}"
        );
        assert_eq!(bootstrap_mean(&values, 1000, 7), bootstrap_mean(&values, 1000, 7));
        assert_eq!(bootstrap_mean(&[0.5; 10], 100, 0), (0.5, 0.5));
        assert_eq!(bootstrap_mean(&[], 100, 0), (0.0, 0.0));
    }

    #[test]
    fn spread_of_values() {
        let (mean, sd) = mean_and_sd(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert_eq!(mean, 5.0);
        assert_eq!(sd, 2.0);
        assert_eq!(mean_and_sd(&[3.0]), (3.0, 0.0));
        assert_eq!(mean_and_sd(&[]), (0.0, 0.0));
    }

    fn near(left: f64, right: f64) {
        assert!((left - right).abs() < 5e-5, "{left} is not {right}");
    }

    /// Reference values: Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3.
    #[test]
    fn wilson_as_published() {
        for (successes, n, low, high) in [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ] {
            let (found_low, found_high) = wilson(successes, n);
            near(found_low, low);
            near(found_high, high);
        }
        assert_eq!(wilson(0, 0), (0.0, 1.0));
        assert_eq!(wilson(20, 20).1, 1.0);
    }

    /// Reference: sums of binomial coefficients by hand: 2·(C(10,0)+C(10,1)+C(10,2))/2^10 = 112/1024.
    #[test]
    fn mcnemar_by_hand() {
        near(mcnemar_exact(2, 8), 112.0 / 1024.0);
        near(mcnemar_exact(8, 2), 112.0 / 1024.0);
        near(mcnemar_exact(5, 5), 1.0);
        near(mcnemar_exact(0, 6), 2.0 / 64.0);
        assert_eq!(mcnemar_exact(0, 0), 1.0);
        assert!(mcnemar_exact(1000, 1100) > 0.02 && mcnemar_exact(1000, 1100) < 0.04);
    }
}
