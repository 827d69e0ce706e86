//! Expert choice, and the chosen experts' work on pairs of a row and an expert.

use super::forms::A8;
use super::gate::Terms;
use super::{Run, Weights, activation, no_kernel};
use crate::backend::BackendError;
use crate::backend::hip::kernels::experts as kernels;
use crate::backend::hip::kernels::matmul::{
    ExpertsA8, ExpertsF32, ExpertsGatedA8, ExpertsGatedF32, GemmExperts, GemmWideExperts, choice,
};
use crate::backend::hip::kernels::thresholds::Order;
use crate::backend::hip::step::bind::{
    Experts, Form, Gate, Grouped, Home, Route, Router, View, Wanted, are_grouped, pair_form,
};
use crate::backend::hip::step::scratch::padded;
use crate::backend::hip::{DevicePtr, Grid};
use crate::program::{ExpertGroups, Gating};
use crate::tensor::DType;

/// One matrix of a layer's experts (gate, up or down): all of one type and size, found through an address table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertTable {
    /// Address of each expert's matrix; 0 for experts that are not resident.
    pub table: DevicePtr<u64>,
    /// Element type.
    pub dtype: DType,
    /// Outputs of a matrix.
    pub rows: u32,
    /// Inputs of a matrix.
    pub cols: u32,
}

/// Most rows whose experts one launch chooses, from the norm on. With more, the products read the weights once for several rows.
const ROUTER_ROWS: u32 = 8;

/// The table of the experts that a choice is for. Binding gives it to one set of experts; with several, the step is not launched
/// unchecked.
fn gate_table(unit: &Route, weights: &Weights<'_>) -> DevicePtr<u64> {
    let set = unit.sets.first().and_then(|set| weights.experts.get(*set).copied().flatten());
    set.map_or(DevicePtr::NULL, |[gate, ..]| gate.table)
}

impl Run<'_> {
    pub(super) fn route(&self, unit: &Route, rows: u32, weights: &Weights<'_>) -> Result<(), BackendError> {
        if let Some(router) = &unit.router {
            if self.routes_at_once(router, rows) {
                return self.route_at_once(unit, router, rows, weights);
            }
            self.norm(&router.norm, rows, weights)?;
            self.side_by_side(&router.product, rows, weights)?;
        }
        let arguments = kernels::Route {
            logits: self.at(unit.logits),
            bias: weights.optional(unit.bias),
            row_seq: self.places.sequences,
            table: gate_table(unit, weights),
            experts: self.plane(unit.out.chosen),
            weights: self.plane(unit.out.weights),
            absent: self.absent,
            scale: unit.scale,
            rows,
            count: unit.count,
            used: unit.out.used,
            normalise: u32::from(unit.normalise),
            sigmoid: u32::from(unit.gating == Gating::Sigmoid),
        };
        match unit.groups {
            Some(groups) => self.route_groups(groups, rows, &arguments),
            None => Ok(self.device.launch(self.stream, kernels::Route::route, Grid::x(rows), &arguments)?),
        }
    }

    /// Chooses experts of the best groups. `of` has the arguments of a choice without groups.
    fn route_groups(&self, groups: ExpertGroups, rows: u32, of: &kernels::Route) -> Result<(), BackendError> {
        let arguments = kernels::RouteGroups {
            logits: of.logits,
            bias: of.bias,
            row_seq: of.row_seq,
            table: of.table,
            experts: of.experts,
            weights: of.weights,
            absent: of.absent,
            scale: of.scale,
            rows,
            count: of.count,
            used: of.used,
            normalise: of.normalise,
            sigmoid: of.sigmoid,
            groups: groups.count,
            groups_used: groups.used,
        };
        let kernel = kernels::RouteGroups::route_groups;
        Ok(self.device.launch(self.stream, kernel, Grid::x(rows), &arguments)?)
    }

    /// Whether one launch norms the rows, makes the logits and chooses: it makes 8-bit rows, and others none.
    fn routes_at_once(&self, router: &Router, rows: u32) -> bool {
        let Router { norm, product } = router;
        let forms = norm.forms.at(rows).without(Form::Float).only();
        let by_rows = self.bound.modes.order == Order::ByRows;
        let few = by_rows && rows <= ROUTER_ROWS && forms == Some(Form::A8);
        let alone = product.matrices.iter().all(|matrix| matrix.cols == norm.group);
        few && alone && norm.group.is_multiple_of(4) && norm.group <= kernels::ROUTER_COLS
    }

    fn route_at_once(
        &self,
        unit: &Route,
        router: &Router,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let Router { norm, product } = router;
        let matrix = product.matrices.first().map(|matrix| weights.matrix(matrix));
        let matrix = matrix.ok_or_else(|| BackendError::Internal("a router has no weights".to_owned()))?;
        let A8 { codes, scales, sums } = self.a8(&norm.out);
        let arguments = kernels::Router {
            x: self.at(norm.from),
            gain: weights.vector(norm.weight),
            w: matrix.at.cast(),
            w_bias: matrix.bias,
            codes,
            scales,
            sums,
            logits: self.at(unit.logits),
            counters: self.scratch.counters.ptr(),
            bias: weights.optional(unit.bias),
            row_seq: self.places.sequences,
            table: gate_table(unit, weights),
            experts: self.plane(unit.out.chosen),
            weights: self.plane(unit.out.weights),
            absent: self.absent,
            eps: norm.eps,
            scale: unit.scale,
            cols: norm.group,
            padded: padded(norm.group as usize) as u32,
            count: unit.count,
            used: unit.out.used,
            normalise: u32::from(unit.normalise),
            sigmoid: u32::from(unit.gating == Gating::Sigmoid),
        };
        let grid = Grid::xy(unit.count.div_ceil(kernels::ROUTER_EXPERTS), rows);
        Ok(self.device.launch(self.stream, kernels::Router::router, grid, &arguments)?)
    }

    pub(super) fn experts(
        &self,
        unit: &Experts,
        rows: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let tables = weights.experts.get(unit.set).copied().flatten();
        let tables = tables.ok_or(BackendError::Absent("no expert of a layer is loaded"))?;
        let [gate, up, down] = tables;
        let used = unit.choice.used;
        let grouped = are_grouped(self.bound.modes, [gate.dtype, down.dtype], rows);
        if let Some(grouped) = unit.grouped.filter(|_| grouped) {
            self.grouped(unit, &grouped, tables, rows * used, weights)?;
        } else {
            let out = self.pair_form(down.dtype);
            if unit.is_apart() {
                self.gated_apart(unit, [gate, up], out, rows * used, weights)?;
            } else {
                self.experts_gated(unit, [gate, up], out, rows * used)?;
            }
            let product = PairProduct { from: &unit.gated, slots: 1, stride: down.rows, chosen_before: true };
            self.pair_product(unit, down, product, self.plane(unit.results), rows * used)?;
        }
        let cols = down.rows;
        let (bias, factor) = (unit.biases.map(|[_, _, down]| down), unit.factors[2]);
        let arguments = kernels::Combine {
            results: self.plane(unit.results),
            weights: self.plane(unit.choice.weights),
            experts: factor.or(bias).map_or(DevicePtr::NULL, |_| self.plane(unit.choice.chosen)),
            factor: weights.optional(factor),
            bias: weights.optional(bias),
            residual: self.at(unit.out),
            used,
            cols,
        };
        let grid = Grid::xy(cols.div_ceil(1024), rows);
        Ok(self.device.launch(self.stream, kernels::Combine::combine, grid, &arguments)?)
    }

    /// Sorts pairs by expert, and multiplies those of an expert together.
    fn grouped(
        &self,
        unit: &Experts,
        grouped: &Grouped,
        [gate, up, down]: [ExpertTable; 3],
        pairs: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let both = both(unit)?;
        let count = gate.table.len() as u32; // at most 512, as binding has checked
        let tiles = choice::ExpertTiles::of(pairs, count);
        let sort = kernels::GroupPairs {
            experts: self.plane(unit.choice.chosen),
            members: self.plane(grouped.members),
            tiles: self.plane(grouped.tiles),
            pairs,
            count,
            size: tiles.size,
            tiles_max: tiles.most,
        };
        self.device.launch(
            self.stream,
            kernels::GroupPairs::group_pairs,
            choice::ExpertTiles::group_grid(),
            &sort,
        )?;
        let slots = unit.choice.used;
        if unit.has_gates {
            self.grouped_product(grouped, tiles, [gate, up], &unit.from, slots, self.at(both))?;
        } else {
            self.grouped_product(grouped, tiles, [up], &unit.from, slots, self.at(both))?;
        }
        self.gate_of_pairs(unit, both, Form::Half, pairs, weights)?;
        self.grouped_product(grouped, tiles, [down], &unit.gated, 1, self.plane(unit.results))
    }

    /// Products of one matrix of each expert, or two side by side, with the rows of its pairs.
    fn grouped_product<const N: usize>(
        &self,
        grouped: &Grouped,
        tiles: choice::ExpertTiles,
        matrices: [ExpertTable; N],
        from: &Home,
        slots: u32,
        out: DevicePtr<f32>,
    ) -> Result<(), BackendError> {
        let Some(&ExpertTable { table, dtype, rows: n, cols }) = matrices.first() else { return Ok(()) };
        let (x, x_scale) = self.halves(from);
        let (table0, table1) = (table, matrices.get(1).map_or(DevicePtr::NULL, |second| second.table));
        let (places, members) = (self.plane(grouped.tiles), self.plane(grouped.members));
        let out_stride = n * N as u32;
        if self.bound.modes.tiled() {
            let chosen =
                choice::gemm_wide_experts(dtype, tiles.size).ok_or_else(|| no_kernel("experts", dtype))?;
            let arguments = GemmWideExperts {
                table0,
                table1,
                tiles: places,
                members,
                n,
                cols,
                x,
                x_scale,
                slots,
                out,
                out_stride,
            };
            let grid = tiles.wide_grid(n, N as u32);
            return Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?);
        }
        let chosen = choice::gemm_experts(dtype, tiles.size).ok_or_else(|| no_kernel("experts", dtype))?;
        let arguments = GemmExperts {
            table0,
            table1,
            tiles: places,
            members,
            n,
            cols,
            x,
            x_stride: cols,
            x_scale,
            slots,
            out,
            out_stride,
        };
        let grid = tiles.grid(n, N as u32);
        Ok(self.device.launch(self.stream, chosen.kernel, grid, &arguments)?)
    }

    /// The gate of pairs whose gates and ups lie side by side.
    fn gate_of_pairs(
        &self,
        unit: &Experts,
        both: View,
        out: Form,
        pairs: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let cols = if unit.has_gates { both.stride / 2 } else { both.stride };
        let up = unit.has_gates.then(|| View { column: both.column + cols, ..both });
        let (activation, forms) = (unit.activation, Wanted::always(out));
        let gate = Gate { activation, gate: both, up, cols, out: unit.gated, forms };
        // The gate of experts without gates is that of their ups.
        let [gates, ups, _] = unit.factors;
        let factors = if unit.has_gates { [gates, ups] } else { [ups, None] };
        let biases = unit.biases.map_or([None; 2], |[gate, up, _]| [Some(gate), Some(up)]);
        let is_there = factors.iter().chain(&biases).any(Option::is_some);
        let [gate_factor, up_factor] = factors.map(|factor| weights.optional(factor));
        let [gate_bias, up_bias] = biases.map(|bias| weights.optional(bias));
        let experts = if is_there { self.plane(unit.choice.chosen) } else { DevicePtr::NULL };
        self.gate(&gate, pairs, &Terms { experts, gate_factor, up_factor, gate_bias, up_bias })
    }

    /// Gate and up, or the up alone, as products of their own, then their gate.
    fn gated_apart(
        &self,
        unit: &Experts,
        tables: [ExpertTable; 2],
        out: Form,
        pairs: u32,
        weights: &Weights<'_>,
    ) -> Result<(), BackendError> {
        let both = both(unit)?;
        let slots = unit.choice.used;
        let product = PairProduct { from: &unit.from, slots, stride: both.stride, chosen_before: false };
        let all = if unit.has_gates { 2 } else { 1 };
        for (number, table) in tables.into_iter().take(all).enumerate() {
            let to = self.at(both).offset(number * table.rows as usize);
            self.pair_product(unit, table, product, to, pairs)?;
        }
        self.gate_of_pairs(unit, both, out, pairs, weights)
    }

    fn pair_form(&self, dtype: DType) -> Form {
        pair_form(self.bound.modes.activations, dtype)
    }

    fn experts_gated(
        &self,
        unit: &Experts,
        [gate, up]: [ExpertTable; 2],
        out: Form,
        pairs: u32,
    ) -> Result<(), BackendError> {
        let (dtype, n, cols) = (gate.dtype, gate.rows, gate.cols);
        let (slots, to) = (unit.choice.used, self.a8(&unit.gated));
        let float = if out == Form::Float { self.floats(&unit.gated) } else { DevicePtr::NULL };
        let (experts, grid) = (self.plane(unit.choice.chosen), choice::experts_gated_grid(n, pairs));
        if self.pair_form(dtype) == Form::A8 {
            let kernel = choice::experts_gated_a8(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
            let A8 { codes, scales, sums } = self.a8(&unit.from);
            let arguments = ExpertsGatedA8 {
                gate_table: gate.table,
                up_table: up.table,
                experts,
                n,
                cols,
                codes,
                scales,
                sums,
                slots,
                activation: activation(unit.activation),
                out_codes: to.codes,
                out_scales: to.scales,
                out_sums: to.sums,
                out: float,
            };
            return Ok(self.device.launch(self.stream, kernel, grid, &arguments)?);
        }
        let kernel = choice::experts_gated_f32(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
        let arguments = ExpertsGatedF32 {
            gate_table: gate.table,
            up_table: up.table,
            experts,
            n,
            cols,
            x: self.floats(&unit.from),
            x_stride: unit.from.float.map_or(cols, |view| view.stride),
            slots,
            activation: activation(unit.activation),
            out_codes: to.codes,
            out_scales: to.scales,
            out_sums: to.sums,
            out: float,
        };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }

    /// The product of each pair with its expert's matrix.
    fn pair_product(
        &self,
        unit: &Experts,
        matrix: ExpertTable,
        PairProduct { from, slots, stride: out_stride, chosen_before }: PairProduct<'_>,
        out: DevicePtr<f32>,
        pairs: u32,
    ) -> Result<(), BackendError> {
        let ExpertTable { table, dtype, rows: n, cols } = matrix;
        let experts = self.plane(unit.choice.chosen);
        let (grid, chosen_before) = (choice::experts_grid(n, pairs), chosen_before.into());
        if self.pair_form(dtype) == Form::A8 {
            let kernel = choice::experts_a8(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
            let A8 { codes, scales, sums } = self.a8(from);
            let arguments = ExpertsA8 {
                table,
                experts,
                n,
                cols,
                codes,
                scales,
                sums,
                slots,
                out,
                out_stride,
                chosen_before,
            };
            return Ok(self.device.launch(self.stream, kernel, grid, &arguments)?);
        }
        let kernel = choice::experts_f32(dtype).ok_or_else(|| no_kernel("experts", dtype))?;
        let (x, x_stride) = (self.floats(from), from.float.map_or(cols, |view| view.stride));
        let arguments =
            ExpertsF32 { table, experts, n, cols, x, x_stride, slots, out, out_stride, chosen_before };
        Ok(self.device.launch(self.stream, kernel, grid, &arguments)?)
    }
}

/// Input and output rows of [`Run::pair_product`].
#[derive(Clone, Copy)]
struct PairProduct<'a> {
    /// Row p / `slots` is that of pair p.
    from: &'a Home,
    /// Pairs of an input row.
    slots: u32,
    /// Values from one pair's results to the next.
    stride: u32,
    /// Another launch lies between the choice of experts and this one.
    chosen_before: bool,
}

/// Where gates and ups of pairs lie. Binding makes room for them if any step needs it.
fn both(unit: &Experts) -> Result<View, BackendError> {
    let missing = || BackendError::Internal("there is no room for the experts' gates and ups".to_owned());
    unit.both.ok_or_else(missing)
}
