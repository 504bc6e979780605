//! Mean and deviation.

/// The mean; 0 of nothing.
#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The deviation of a sample (over `n - 1`); 0 of fewer than two.
#[must_use]
pub fn deviation(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_deviation_of_samples() {
        assert_eq!((mean(&[]), deviation(&[])), (0.0, 0.0));
        assert_eq!((mean(&[7.5]), deviation(&[7.5])), (7.5, 0.0));
        let values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0];
        assert_eq!(mean(&values), 5.0);
        assert!((deviation(&values) - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
        // Large values that differ little: the sum of squares less the square of the sum would lose it.
        let large = [1e12 + 1.0, 1e12 + 2.0, 1e12 + 3.0];
        assert!((deviation(&large) - 1.0).abs() < 1e-6);
    }
}
