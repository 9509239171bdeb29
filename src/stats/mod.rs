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

#[cfg(test)]
mod tests {
    use super::*;

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
